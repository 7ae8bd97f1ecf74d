"""Compile every Triton kernel variant without a GPU, and read what it takes from the machine code.

    python -m ringflash.testing.aot 80 90 100      prints a JSON line per variant: registers, spilled bytes, shared memory

Runs in a process of its own, because kernels imported under Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringflash.kernels.triton.backward import key_gradient_kernel, query_gradient_kernel
from ringflash.kernels.triton.forward import forward_kernel
from ringflash.kernels.triton.tuning import FORWARD, KEY_GRADIENT, QUERY_GRADIENT, Tiles, padded, tiles
from ringflash.testing.machine_code import Usage, resources

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP32_POINTERS = ("before_ptr", "out_ptr", "lse_ptr", "delta_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "slopes_ptr")
INT_POINTERS = ("lo_ptr", "hi_ptr", "rows_at_ptr", "keys_at_ptr")
FLOATS, LONGS = ("scale", "softcap", "keep_scale"), ("seed", "threshold")


@dataclass(frozen=True)
class Variant:
    """One kernel, ready to compile."""

    kernel: Any
    head_dim: int
    dtype: torch.dtype
    capability: int
    tiles: Tiles
    flag: tuple[str, bool] | None
    is_scored: bool = False  # with every term of the score that kernels know
    is_causal: bool = False  # for a causal square

    @property
    def name(self) -> str:
        flag = "" if self.flag is None else f" {self.flag[0]}={self.flag[1]}"
        flag += " scored" if self.is_scored else " causal" if self.is_causal else ""
        return f"{self.kernel.__name__} d{self.head_dim} {SHORT[self.dtype]} sm_{self.capability}{flag}"


def variants(capability: int) -> Iterator[Variant]:
    for dtype in (torch.bfloat16, torch.float32):
        for D in (64, 128, 256):
            forward, key, query = (tiles(t, D, dtype, capability) for t in (FORWARD, KEY_GRADIENT, QUERY_GRADIENT))
            yield Variant(forward_kernel, D, dtype, capability, forward, ("INTO", True))
            yield Variant(key_gradient_kernel, D, dtype, capability, key, ("ADD_DQ", True))
            yield Variant(query_gradient_kernel, D, dtype, capability, query, None)
            if dtype == torch.bfloat16:
                yield Variant(forward_kernel, D, dtype, capability, forward, ("INTO", False))
                yield Variant(key_gradient_kernel, D, dtype, capability, key, ("ADD_DQ", False))
    # fp16 compiles like bf16, and a head dim that is padded like the next power of two: one of each together.
    half = torch.float16
    yield Variant(forward_kernel, 96, half, capability, tiles(FORWARD, 96, half, capability), ("INTO", True))
    forward, key, query = (tiles(t, 128, half, capability) for t in (FORWARD, KEY_GRADIENT, QUERY_GRADIENT))
    yield Variant(forward_kernel, 128, half, capability, forward, ("INTO", True), is_scored=True)
    yield Variant(key_gradient_kernel, 128, half, capability, key, ("ADD_DQ", False), is_scored=True)
    yield Variant(query_gradient_kernel, 128, half, capability, query, None, is_scored=True)
    yield Variant(key_gradient_kernel, 128, half, capability, key, ("ADD_DQ", False), is_causal=True)
    yield Variant(query_gradient_kernel, 128, half, capability, query, None, is_causal=True)
    for head_dim in (64, 128):
        forward = tiles(FORWARD, head_dim, half, capability)
        yield Variant(forward_kernel, head_dim, half, capability, forward, ("INTO", False), is_causal=True)


def compile_variant(variant: Variant) -> Usage:
    constants: dict[str, Any] = {
        "HEAD_DIM": variant.head_dim,
        "VALUE_DIM": variant.head_dim,
        "BLOCK_Q": variant.tiles.block_q,
        "BLOCK_K": variant.tiles.block_k,
        "BLOCK_D": padded(variant.head_dim),
        "BLOCK_DV": padded(variant.head_dim),
        "PRECISION": "bf16x6" if variant.dtype == torch.float32 else "tf32",
    }
    # Results are rounded where they are stored for good, which is where nothing is added up.
    is_whole = variant.flag is not None and not variant.flag[1]
    constants |= {"IS_LAST": is_whole, "STORE": is_whole}
    constants |= dict.fromkeys(("HAS_SOFTCAP", "HAS_ALIBI", "HAS_DROPOUT"), variant.is_scored)
    constants["IS_CAUSAL"] = variant.is_causal
    if not variant.is_scored:
        constants |= dict.fromkeys(("slopes_ptr", "rows_at_ptr", "keys_at_ptr"))
    if variant.flag is not None:
        constants[variant.flag[0]] = variant.flag[1]
    constants = {name: value for name, value in constants.items() if name in variant.kernel.arg_names}
    signature, attributes = {}, {}
    for position, name in enumerate(variant.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            is_rounded = is_whole and name in ("out_ptr", "dk_ptr", "dv_ptr")
            kind = (
                "fp32"
                if name in FP32_POINTERS and not is_rounded
                else "i32"
                if name in INT_POINTERS
                else SHORT[variant.dtype]
            )
            signature[name] = f"*{kind}"
        else:
            signature[name] = "fp32" if name in FLOATS else "i64" if name in LONGS else "i32"
        # As in real calls: pointers and token strides are multiples of 16.
        if name not in constants and (
            name.endswith("_ptr") or (name.startswith("stride_") and name != "stride_bounds")
        ):
            attributes[(position,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(variant.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", variant.capability, 32),
        options={"num_warps": variant.tiles.num_warps, "num_stages": variant.tiles.num_stages},
    )
    registers, stack = resources(compiled.asm["cubin"])
    return Usage(
        variant.name, registers, stack, compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", 0) or 0
    )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for variant in variants(int(argument)):
            print(json.dumps(asdict(compile_variant(variant))), flush=True)
