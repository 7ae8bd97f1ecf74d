"""A plain FSDP2 training script, as many people have one. Its context-parallel twin is 04_fsdp2.py.

    python examples/04_fsdp2_plain.py
    torchrun --standalone --nproc-per-node 2 examples/04_fsdp2_plain.py    (more data per step)

Alone it prints:

    step 0  loss 5.8787  gradient norm 0.8143
    step 1  loss 5.9168  gradient norm 0.8041
    step 2  loss 5.8864  gradient norm 0.8036
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCABULARY, HIDDEN, HEADS, LAYERS, TOKENS, BATCH = 256, 64, 4, 2, 128, 2


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, positions, labels):
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def read(step, reader, readers, device):
    """The batch of one of the readers of a data set, here of random tokens."""
    generator = torch.Generator().manual_seed(step * readers + reader)
    return torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator).to(device)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(0))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    model = GPT(attend).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.arange(TOKENS, device=device)[None]
    for step in range(3):
        ids = read(step, mesh.get_local_rank(), mesh.size(), device)
        batch = ids[:, :-1], positions, ids[:, 1:]
        loss = model(*batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / mesh.size()
        dist.all_reduce(loss)
        if mesh.get_local_rank() == 0:
            print(f"step {step}  loss {loss:.4f}  gradient norm {norm:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
