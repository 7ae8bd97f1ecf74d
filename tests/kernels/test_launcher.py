"""Launches are told apart at least as finely as Triton compiles them."""

import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from ringflash.kernels.hopper import launch
from ringflash.kernels.triton import forward, sums
from ringflash.kernels.triton.launcher import Launcher, kind, launcher
from ringflash.testing import aot_hopper
from ringflash.testing.aot_hopper import KERNELS, Sm90, Variant, variants

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture
def no_device(monkeypatch):
    """What a launch asks of a GPU, on a machine without one."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_counter", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(triton.runtime.driver, "_active", Sm90())


def calls():
    """Variants of every kernel, each in both types and in two lengths, of which one is no multiple of anything."""
    every = [v for direction in ("forward", "backward") for v in variants(direction)]
    for variant, dtype, tokens in product(every, DTYPES, (256, 257)):
        fields = {**vars(variant), "dtype": dtype, "tokens": tokens}
        yield Variant(**fields)


def compiled_for(kernel, arguments, options):
    *_, binder = kernel.device_caches[0]
    _, specialization, rest = binder(*arguments, **options, debug=False, instrumentation_mode="")
    return str(specialization), str(rest)


class Noting:
    """Stands for a Launcher: notes its key, and what Triton would compile for."""

    def __init__(self, launcher, noted):
        self.kernel, self.noted = launcher.kernel, noted

    def __getitem__(self, grid):
        def note(*arguments, **options):
            key = (self.kernel.fn.__name__, *kind(arguments, options))
            self.noted.append((key, compiled_for(self.kernel, arguments, options)))

        return note


def test_what_triton_compiles_apart_is_told_apart(no_device):
    noted = []
    with patch.multiple(launch, **{name: Noting(getattr(launch, name), noted) for name in KERNELS}):
        for variant in calls():
            (aot_hopper._forward if variant.direction == "forward" else aot_hopper._backward)(variant)
    assert {name for (name, *_), _ in noted} == set(KERNELS)
    found = {}
    for key, compiled in noted:
        assert found.setdefault(key, compiled) == compiled, key


class Parameter:
    def __init__(self, name, is_constexpr=False, do_not_specialize=True):
        self.name, self.is_constexpr, self.do_not_specialize = name, is_constexpr, do_not_specialize


class Kernel:
    """Notes what is compiled, and what is launched of it with what."""

    params = (Parameter("x"), Parameter("n"), Parameter("scale"), Parameter("SIZE", True), Parameter("KIND", True))

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def first(*arguments, **options):
            number = len(self.compiled)
            self.compiled.append((grid, arguments, options))
            noted = self.launched

            class Compiled:
                def __getitem__(self, grid):
                    return lambda *arguments: noted.append((number, grid, arguments))

            return Compiled()

        return first


OPTIONS = {"KIND": "full", "SIZE": 64, "num_warps": 4}


def test_a_second_launch_of_a_kind_finds_what_was_compiled(no_device):
    kernel = Kernel()
    launcher, x, y = Launcher(kernel), torch.zeros(4), torch.zeros(9)
    launcher[(5,)](x, 7, 0.5, **OPTIONS)
    launcher[(6, 2)](y, 17, 1.0, **OPTIONS)
    assert kernel.compiled == [((5,), (x, 7, 0.5), OPTIONS)]
    # Constants follow in the order of the kernel's parameters; options that are none do not.
    assert kernel.launched == [(0, (6, 2, 1, 1), (y, 17, 1.0, 64, "full"))]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((torch.zeros(4, dtype=torch.int32), 7, 0.5), {}),
        ((torch.zeros(5)[1:], 7, 0.5), {}),
        ((torch.zeros(4), 1 << 31, 0.5), {}),
        ((torch.zeros(4), 1, 0.5), {}),
        ((torch.zeros(4), 32, 0.5), {}),
        ((torch.zeros(4), 7, None), {}),
        ((torch.zeros(4), 7, 0.5), {"SIZE": 128}),
        ((torch.zeros(4), 7, 0.5), {"num_warps": 8}),
    ],
    ids=["dtype", "alignment", "wide integer", "one", "multiple of 16", "none", "constant", "option"],
)
def test_another_kind_is_compiled_anew(no_device, arguments, options):
    kernel = Kernel()
    launcher = Launcher(kernel)
    launcher[(5,)](torch.zeros(4), 7, 0.5, **OPTIONS)
    launcher[(5,)](*arguments, **OPTIONS | options)
    assert len(kernel.compiled) == 2


def test_another_device_is_compiled_for_anew(no_device, monkeypatch):
    kernel = Kernel()
    launcher = Launcher(kernel)
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launcher[(5,)](torch.zeros(4), 7, 0.5, **OPTIONS)
    assert len(kernel.compiled) == 2


def test_a_parameter_of_a_module_is_told_apart_as_a_tensor_is(no_device):
    x = torch.zeros(4)
    assert kind((torch.nn.Parameter(x), 7), {}) == kind((x, 7), {})
    assert kind((torch.nn.Parameter(x.double()), 7), {}) != kind((x, 7), {})


numbers = st.integers(0, 40) | st.sampled_from([1, 16, 2**31 - 1, 2**31, 2**40])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(numbers, min_size=12, max_size=12), min_size=2, max_size=6), st.integers(0, 3))
def test_what_triton_specialises_is_told_apart(rows, shift):
    """Of any kernel: here of the one that adds gradients, whose integers are strides."""
    kernel, found = JITFunction(getattr(sums.sum_kernel, "fn", sums.sum_kernel)), {}
    x = torch.zeros(64)
    options = {"DIM": 8, "ROWS": 32, "BLOCK_D": 64, "HAS_SECOND": True, "num_warps": 4}
    with patch.object(torch.cuda, "current_device", lambda: 0), patch.object(triton.runtime.driver, "_active", Sm90()):
        for row in rows:
            arguments = (x[shift:], x, x.half(), *row[:9], *row[9:11])
            compiled = compiled_for(kernel, arguments, options)
            assert found.setdefault(kind(arguments, options), compiled) == compiled


def test_under_the_interpreter_a_kernel_is_launched_as_it_is():
    assert launcher(forward.forward_kernel) is forward.forward_kernel


def test_on_amd_a_kernel_is_launched_as_it_is(monkeypatch):
    """There Triton tells large tensors apart, which their keys do not."""
    assert isinstance(launcher(Kernel()), Launcher)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    kernel = Kernel()
    assert launcher(kernel) is kernel


def test_else_all_kernels_are_launched_by_launchers():
    code = (
        "from ringflash.kernels.triton import launch, sums; from ringflash.kernels.triton.launcher import Launcher; "
        "names = ('forward_kernel', 'delta_kernel', 'key_gradient_kernel', 'query_gradient_kernel'); "
        "assert all(isinstance(getattr(launch, name), Launcher) for name in names) and isinstance(sums._launched, Launcher)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert all(isinstance(getattr(launch, name), Launcher) for name in KERNELS)
