"""Packed documents: a batch as data loaders make it, cut across processes, with the loss of one process.

    python examples/03_packed_documents.py
    torchrun --standalone --nproc-per-node 2 examples/03_packed_documents.py

It prints, alone and on any number of processes:

    packing    4 documents and 64 tokens of padding, 956 labels
    layout     tokens per rank differ by at most 1 %, work by at most 5 %: True
    loss       5.8904, of every label once
    gradient   norm 0.2760, the same as that of documents one by one: True
"""

import torch
import torch.distributed as dist
from torch import nn

import ringflash as rf
from ringflash.training import count_tokens, documents, shard_batch, token_loss

LENGTHS, TOKENS, VOCABULARY, HIDDEN, HEADS = [500, 300, 120, 40], 1024, 256, 64, 4


class Model(nn.Module):
    """One layer of attention between an embedding and its transpose; rotary positions are left out to keep it short."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.where = nn.Embedding(TOKENS, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.attend = rf.RingAttention()

    def forward(self, ids, positions, mask, ring=None):
        x = self.embed(ids) + self.where(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HIDDEN // HEADS)).unbind(2)
        self.attend.ring = ring
        x = x + self.attend(q, k, v, mask).flatten(2)
        return x @ self.embed.weight.T


def main():
    if dist.is_torchelastic_launched():
        dist.init_process_group()
        if torch.cuda.is_available():
            torch.cuda.set_device(dist.get_node_local_rank())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)
    ids = torch.randint(VOCABULARY, (1, TOKENS)).to(device)  # the whole packed sequence, the same on every rank

    # From lengths, cu_seqlens or position ids: a mask, positions that restart, and labels that never cross a border.
    packing = documents(lengths=LENGTHS, causal=True, length=TOKENS)
    ring = rf.Ring(layout=rf.Balanced(packing.mask))  # equal tokens and equal work, whatever the documents
    whole = {"ids": ids, "labels": packing.labels(ids), "positions": packing.position_ids[None].to(device)}
    local = shard_batch(whole, ring, {"ids": 1, "labels": 1, "positions": 1})  # shifted first, then cut

    tokens = count_tokens(local["labels"], ring, averaged_over=1)  # valid labels of the whole batch, counted once
    logits = model(local["ids"], local["positions"], packing.mask, ring)
    loss = token_loss(logits, local["labels"], tokens)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    if ring.ranks > 1:
        dist.all_reduce(gradient)  # of one weight, the ranks of a ring hold shares of one sum

    # The same without a ring and without packing: each document by itself.
    model.zero_grad()
    total = 0.0
    for one in ids[:, : sum(LENGTHS)].split(LENGTHS, dim=1):
        logits = model(one, torch.arange(one.shape[1], device=device)[None], rf.Causal())
        total = total + nn.functional.cross_entropy(logits[0, :-1], one[0, 1:], reduction="sum")
    (total / tokens.count).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])

    work = rf.plan(packing.mask, ring.layout, TOKENS, ring.rank, ring.ranks).pairs_per_rank
    held = [ring.layout.shard_length(TOKENS, rank, ring.ranks) for rank in range(ring.ranks)]
    true_loss = tokens.true_loss(loss.detach()).item()
    if ring.rank == 0:
        is_fair = max(held) <= 1.01 * min(held) and max(work) <= 1.05 * min(work)
        padding, is_same = TOKENS - sum(LENGTHS), bool((gradient - expected).norm() < 1e-5 * expected.norm())
        print(f"packing    {len(LENGTHS)} documents and {padding} tokens of padding, {int(tokens.count)} labels")
        print(f"layout     tokens per rank differ by at most 1 %, work by at most 5 %: {is_fair}")
        print(f"loss       {true_loss:.4f}, of every label once")
        print(f"gradient   norm {gradient.norm():.4f}, the same as that of documents one by one: {is_same}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
