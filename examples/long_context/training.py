"""The training step: where the sequence is cut, and how the gradient of the whole comes out of the parts."""

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ringflash as rf
from long_context.model import ModelConfig, Transformer
from long_context.processes import Processes, peak_memory_bytes
from long_context.settings import Recipe
from long_context.text import Packed, Packing
from ringflash.training import position_ids, shift_labels

IGNORED = -100
LARGEST_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Shard:
    """This rank's part of one sequence: tokens, labels [1, S_local], positions [S_local], on the device.

    mask and valid (the number of labels that count) are of the whole sequence.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    mask: rf.Documents
    valid: int


def cut(packed: Packed, ring: rf.Ring | None, device: torch.device) -> Shard:
    """Cut one packed sequence. ring=None keeps it whole."""
    # Labels are shifted on the whole sequence, then cut. The other way round, the last token of every part would need
    # its label from a neighbour; and with zigzag each rank holds two parts.
    labels = shift_labels(packed.tokens, lengths=packed.lengths, ignore_index=IGNORED)
    # Positions restart in each document. Rotary scores see differences only, so global positions would train the same
    # model; small angles are just more exact.
    positions = position_ids(packed.lengths)
    valid = int((labels != IGNORED).sum())

    tokens = packed.tokens
    if ring is not None:
        tokens, labels, positions = ring.shard(tokens), ring.shard(labels), ring.shard(positions, dim=0)
    return Shard(
        tokens=tokens.to(device),
        labels=labels.to(device),
        positions=positions.to(device),
        mask=rf.Documents(packed.lengths, causal=True),
        valid=valid,
    )


def summed_loss(model: nn.Module, shard: Shard) -> torch.Tensor:
    """Cross entropy in nats, summed over the labels held here (a mean over them would weigh ranks, not tokens)."""
    logits = model(shard.tokens, shard.positions, shard.mask)
    # fp32: a sum over tens of thousands of tokens in bf16 would stop growing.
    return F.cross_entropy(logits.float().flatten(0, 1), shard.labels.flatten(), ignore_index=IGNORED, reduction="sum")


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth. A function of the step alone, so there is nothing to checkpoint."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices, none for norm weights, which have no reason to be small."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def shard_parameters(model: Transformer, processes: Processes) -> None:
    """FSDP2: each rank keeps 1/ranks of every weight, gathers a block's weights just before use, averages gradients."""
    policy = MixedPrecisionPolicy(
        param_dtype=model.config.compute_dtype,
        reduce_dtype=torch.float32,
        # The model casts what it wants cast; FSDP would round the rotary angles to bf16 on their way into a block.
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        fully_shard(block, mesh=processes.mesh, mp_policy=policy)
    fully_shard(model, mesh=processes.mesh, mp_policy=policy)


class Trainer:
    """Model, optimizer and text of one run. With ring=None and one process it is ordinary training."""

    def __init__(
        self, recipe: Recipe, config: ModelConfig, processes: Processes, ring: rf.Ring | None, packing: Packing
    ) -> None:
        self.recipe, self.processes, self.ring, self.packing = recipe, processes, ring, packing
        self.model = Transformer(config, ring=ring, seed=recipe.seed).to(processes.device)
        if processes.mesh is not None:
            shard_parameters(self.model, processes)
        self.optimizer = build_optimizer(self.model, recipe.lr)
        self.step = 0  # the next one to be taken; also the number taken so far

    def take_step(self) -> dict:
        """One optimizer step over `batch` sequences. Returns what metrics.jsonl keeps of it, the same on every rank.

            loss = sum over all tokens of all ranks / number of tokens that count

        FSDP *averages* gradients over ranks, so each rank's sum is multiplied by their number to make it a sum.
        """
        begin = time.perf_counter()
        device, ranks = self.processes.device, self.processes.ranks
        first = self.step * self.recipe.batch
        shards = [cut(self.packing[first + place], self.ring, device) for place in range(self.recipe.batch)]
        valid = sum(shard.valid for shard in shards)

        local_loss = torch.zeros((), device=device)
        for shard in shards:
            loss = summed_loss(self.model, shard) / valid
            (loss * ranks).backward()
            local_loss += loss.detach()

        norm = nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM)
        lr = learning_rate(self.recipe, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()

        # Under FSDP the norm is a DTensor, each rank has the part of its own weights.
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        everyone = self.processes.gather_floats(local_loss.item(), peak_memory_bytes(device))
        step_s = time.perf_counter() - begin
        metrics = {
            "step": self.step,
            "loss": math.fsum(loss for loss, _ in everyone),
            "grad_norm": norm.item(),
            "lr": lr,
            "step_s": step_s,
            "tokens_per_s": self.recipe.batch * self.recipe.seq_len / step_s,
            "peak_memory_bytes": [int(peak) for _, peak in everyone],
        }
        self.step += 1
        return metrics

    @torch.no_grad()
    def validate(self, held_out: Packing, *, sequences: int) -> float:
        """Mean loss on the first sequences of text that is never trained on, in nats per byte."""
        shards = [cut(held_out[index], self.ring, self.processes.device) for index in range(sequences)]
        local_loss = sum(summed_loss(self.model, shard).item() for shard in shards)
        everyone = self.processes.gather_floats(local_loss)
        return math.fsum(loss for (loss,) in everyone) / sum(shard.valid for shard in shards)
