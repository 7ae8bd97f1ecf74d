"""Launches of the Hopper kernels are told apart as finely as Triton compiles them, and descriptors are what Triton makes."""

from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import pytest
import torch
import triton

from ringflash.kernels.hopper import launch
from ringflash.kernels.hopper.arguments import Launcher, described, described_rows, kind
from ringflash.kernels.hopper.gluon import TensorDescriptor, gl
from ringflash.kernels.partial import row_statistic
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


class Noting:
    """Stands for a Launcher: notes its key, and what Triton would compile for."""

    def __init__(self, launcher, noted):
        self.kernel, self.noted = launcher.kernel, noted

    def __getitem__(self, programs):
        def note(*arguments, **options):
            key = (self.kernel.fn.__name__, *kind(arguments, options))
            *_, binder = self.kernel.device_caches[0]
            _, specialization, rest = binder(*arguments, **options, debug=False, instrumentation_mode="")
            self.noted.append((key, (str(specialization), str(rest))))

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
    # And not much more finely: a new length finds what there is.
    assert len(set(found.values())) == len(found)
    assert len(found) < len(noted) / 1.5


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
    launcher[5](x, 7, 0.5, **OPTIONS)
    launcher[6](y, 16, 1.0, **OPTIONS)
    assert kernel.compiled == [((5,), (x, 7, 0.5), OPTIONS)]
    # Constants follow in the order of the kernel's parameters; options that are none do not.
    assert kernel.launched == [(0, (6, 1, 1), (y, 16, 1.0, 64, "full"))]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((torch.zeros(4, dtype=torch.int32), 7, 0.5), {}),
        ((torch.zeros(5)[1:], 7, 0.5), {}),
        ((torch.zeros(4), 1 << 31, 0.5), {}),
        ((torch.zeros(4), 7, 0.5), {"SIZE": 128}),
        ((torch.zeros(4), 7, 0.5), {"num_warps": 8}),
    ],
    ids=["dtype", "alignment", "wide integer", "constant", "option"],
)
def test_another_kind_is_compiled_anew(no_device, arguments, options):
    kernel = Kernel()
    launcher = Launcher(kernel)
    launcher[5](torch.zeros(4), 7, 0.5, **OPTIONS)
    launcher[5](*arguments, **OPTIONS | options)
    assert len(kernel.compiled) == 2


def test_another_device_is_compiled_for_anew(no_device, monkeypatch):
    kernel = Kernel()
    launcher = Launcher(kernel)
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launcher[5](torch.zeros(4), 7, 0.5, **OPTIONS)
    assert len(kernel.compiled) == 2


def test_integers_that_triton_specialises_are_refused(no_device):
    kernel = Kernel()
    kernel.params = (*Kernel.params[:1], Parameter("n", do_not_specialize=False), *Kernel.params[2:])
    with pytest.raises(AssertionError, match="would have to be told apart"):
        Launcher(kernel)[5](torch.zeros(4), 7, 0.5, **OPTIONS)


def facts(descriptor):
    return {**vars(descriptor), "base": descriptor.base.data_ptr(), "kind": None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_descriptors_are_what_triton_makes(dtype):
    x = torch.randn(3, 50, 4, 64).to(dtype)
    for view in (x, x[:, 8:40], x[:, :, 1:3], x.transpose(1, 2).contiguous().transpose(1, 2), x[1:2, ::2]):
        B, S, H, D = view.shape
        b, s, h, _ = view.stride()
        layout = gl.NVMMASharedLayout(128, dtype.itemsize * 8, rank=4)
        expected = TensorDescriptor(view, [B, H, S, D], [b if B > 1 else D, h, s, 1], [1, 1, 32, 64], layout)
        assert facts(described(view, 32, 64)) == facts(expected)


def test_row_statistics_are_described_as_triton_does():
    x = row_statistic(torch.empty(2, 64, 3, 8), torch.float32)
    layout = gl.NVMMASharedLayout(0, 32, rank=2)
    assert facts(described_rows(x, 16)) == facts(TensorDescriptor(x.transpose(1, 2), [6, 64], [64, 1], [1, 16], layout))


@pytest.mark.parametrize("is_shifted", [True, False], ids=["address", "strides"])
def test_what_the_copy_engine_does_not_take_is_copied(is_shifted):
    whole = torch.randn(2, 9, 4, 24).bfloat16()
    x = whole.flatten()[4 : 4 + 2 * 8 * 4 * 24].view(2, 8, 4, 24) if is_shifted else whole.transpose(1, 3)[..., :8]
    found = described(x, 64, 64)
    assert torch.equal(found.base, x)
    assert found.base.is_contiguous()
    with pytest.raises(AssertionError, match="memory that is contiguous"):
        described(x, 64, 64, is_written=True)
