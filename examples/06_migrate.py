"""Moving a script from ring-flash-attention: the line that changes, and what the script may become.

    python examples/06_migrate.py
    torchrun --standalone --nproc-per-node 2 examples/06_migrate.py

It prints, with numbers that are the same alone and on any number of processes:

    ring-flash-attention's names   loss 0.025509  norm of dq 0.000535
    ringflash's own                loss 0.025509  norm of dq 0.000535
"""

import torch
import torch.distributed as dist

import ringflash as rf

# The old script had `from ring_flash_attn import zigzag_ring_flash_attn_func`. This is the line that changes.
from ringflash.compat.ring_flash_attn import zigzag_ring_flash_attn_func

TOKENS, HEADS, KEY_HEADS, DIM = 512, 8, 2, 32


def old_script(q, k, v, rank, ranks):
    """As it was: pieces are cut by hand, the function finds the default group."""

    def cut(x):
        pieces = x.chunk(2 * ranks, dim=1)
        return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], dim=1).detach().requires_grad_()

    q, k, v = cut(q), cut(k), cut(v)
    out = zigzag_ring_flash_attn_func(q, k, v, causal=True)
    return out, q


def new_script(q, k, v, ring):
    """What it may become: any length, any layout and mask, packed documents, cross attention."""
    q, k, v = (ring.shard(x).requires_grad_() for x in (q, k, v))
    out = rf.attention(q, k, v, ring=ring, mask=rf.Causal())
    return out, q


def report(name, out, q, ring):
    """Losses and gradients are summed over the ranks that hold the tokens."""
    loss = out.square().sum() / (TOKENS * HEADS * DIM)
    (dq,) = torch.autograd.grad(loss, q)
    totals = torch.stack([loss.detach(), dq.square().sum()])
    if ring.ranks > 1:
        dist.all_reduce(totals)
    if ring.rank == 0:
        print(f"{name:30s} loss {totals[0]:.6f}  norm of dq {totals[1].sqrt():.6f}")


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_torchelastic_launched():
        dist.init_process_group()
        if device == "cuda":
            torch.cuda.set_device(dist.get_node_local_rank())
    ring = rf.Ring()
    torch.manual_seed(0)  # every rank draws the same whole sequence, and takes its part
    q, k, v = (torch.randn(1, TOKENS, heads, DIM).to(device) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    report("ring-flash-attention's names", *old_script(q, k, v, ring.rank, ring.ranks), ring)
    report("ringflash's own", *new_script(q, k, v, ring), ring)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
