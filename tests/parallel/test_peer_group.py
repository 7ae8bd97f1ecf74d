"""R56: who holds a process group after it was destroyed makes the end of the process abort, now and then."""

from tests.scripts import output_of

SCRIPT = """
import gc, sys, weakref
import torch, torch.distributed as dist
import ringflash as rf
from ringflash.ring import ring_of_group

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
rings = [rf.Ring(transport=name) for name in ("peer", "gathered", "symmetric")] + [ring_of_group(None)]
q = torch.randn(1, 8, 2, 4, requires_grad=True)
for ring in rings:
    rf.attention(q, q, q, ring=ring).sum().backward()
dist.destroy_process_group()
gc.collect()
assert group() is None, gc.get_referrers(group())
try:
    rings[0].transport.group
except RuntimeError as error:
    print(error)
"""


def test_R56_rings_hold_no_group_that_was_destroyed():
    printed = output_of("-c", SCRIPT)
    assert printed == "Ring: its process group was destroyed; make a new Ring, of a group that is there\n"
