"""The only module that knows which Triton this is: Gluon's names differ between releases, the kernels' do not.

Another release than those of `VERSIONS` is refused with a reason, and the Triton kernels serve.
"""

from __future__ import annotations

from typing import Any

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon as _gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as _TensorDescriptor
from triton.language import core

VERSIONS = ("3.6", "3.8")
VERSION = ".".join(triton.__version__.split(".")[:2])

try:
    gluon = _gluon
    gl = language
    TensorDescriptor = _TensorDescriptor
    mbarrier = hopper.mbarrier
    fence_async_shared = hopper.fence_async_shared
    warpgroup_mma = hopper.warpgroup_mma
    warpgroup_mma_wait = hopper.warpgroup_mma_wait
    tma_store_wait = hopper.tma.store_wait

    if hasattr(hopper.tma, "async_load"):
        aggregate = triton.aggregate
        warpgroup_barrier = gl.barrier
        tma_load, tma_store, tma_add = hopper.tma.async_load, hopper.tma.async_store, hopper.tma.async_atomic_add
    else:
        aggregate = core._aggregate
        warpgroup_barrier = gl.thread_barrier
        tma_load, tma_store = hopper.tma.async_copy_global_to_shared, hopper.tma.async_copy_shared_to_global

        @_core.builtin
        def tma_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
            """Add a shared tile into global memory; the compiler knows how, its Python does not yet."""
            coord = _semantic._convert_to_ir_values(coord, require_i64=False)
            kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
            _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)
except AttributeError as error:
    # A reason to ask the next backend, as where Triton is missing.
    raise ImportError(f"triton {VERSION} has other names than {' and '.join(VERSIONS)}: {error}") from error
