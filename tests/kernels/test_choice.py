"""choose(): the device's preference, names that insist, and reasons that are kept."""

import sys
import warnings

import pytest
import torch
import triton
from triton.experimental.gluon.language.nvidia import hopper as gluon_hopper

import ringflash as rf
from ringflash.kernels.backend import Call, choose
from ringflash.kernels.hopper import launch as hopper
from ringflash.kernels.score import Score


def call(**changes):
    facts = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "query_heads": 2,
        "key_heads": 2,
        "head_dim": 64,
        "value_dim": 64,
        "scale": 1.0,
        "terms": frozenset(),
        "deterministic": False,
    }
    return Call(**{**facts, **changes})


def test_a_cpu_takes_the_reference():
    assert choose(call()).backend.name == "reference"
    assert choose(call()).refusals == ()


def test_a_gpu_takes_what_serves_first_and_keeps_the_reasons_of_what_cannot():
    gpu = torch.device("cuda", 0)
    chosen = choose(call(device=gpu, dtype=torch.float16))
    assert chosen.backend.name == "triton"
    assert chosen.refusals == (("hopper", "device cuda:0 is not a GPU that is here"),)
    with pytest.warns(UserWarning, match="dtype torch.float64 is not one of .*The reference serves it"):
        choice = choose(call(device=gpu, dtype=torch.float64))
    assert choice.backend.name == "reference"
    assert choice.refusals[1:] == (("triton", "dtype torch.float64 is not one of float16, bfloat16, float32"),)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("hopper", {}, "device cpu is not a GPU"),
        ("triton", {"dtype": torch.float64}, "dtype torch.float64 is not one of"),
        ("triton", {"head_dim": 576}, "head_dim 576 is more than 256"),
        ("triton", {"value_dim": 512}, "value_dim 512 is more than 256"),
        ("flash", {"terms": frozenset({"sinks", "softcap"})}, "it has no softcap"),
        ("flash", {"scale": 0.0}, "scale 0.0 is not positive"),
        ("flash", {"needs_dlse": True}, "it cannot differentiate lse"),
        ("cudnn", {}, "device cpu is not cuda"),
        ("flash", {"value_dim": 32}, "value_dim 32 differs"),
        ("flash", {"dtype": torch.float16}, "dtype torch.float16 is not one of float32, float64 on a CPU"),
        (
            "flash",
            {"device": torch.device("cuda"), "dtype": torch.float16, "head_dim": 60, "value_dim": 60},
            "head_dim 60",
        ),
        (
            "cudnn",
            {"device": torch.device("cuda"), "dtype": torch.float16, "deterministic": True},
            "not deterministic|no cuDNN",
        ),
        ("reference", {"dtype": torch.float8_e4m3fn}, "float8_e4m3fn is not one of"),
    ],
)
def test_a_name_means_that_backend_or_an_error(name, changes, reason):
    with pytest.raises(NotImplementedError, match=f"attention: backend '{name}' cannot run this call: .*{reason}"):
        choose(call(**changes), name)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError,
        match="backend = 'fast'; must be None, a KernelTable or one of 'hopper', 'triton', 'cudnn', 'flash', 'fa4', 'ref",
    ):
        choose(call(), "fast")


@pytest.fixture
def hopper_gpu(monkeypatch):
    """A call for a GPU that is not here but of the right kind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a Hopper that nobody has measured")
    choose.cache_clear()
    yield call(device=torch.device("cuda", 0), dtype=torch.float16)
    choose.cache_clear()


def test_the_hopper_kernels_serve_with_the_triton_they_know(hopper_gpu):
    assert choose(hopper_gpu).backend.name == "hopper"


def test_another_triton_is_named_and_the_triton_kernels_serve(hopper_gpu, monkeypatch):
    monkeypatch.setattr(hopper, "VERSION", "3.9")
    reason = "triton 3.9 is not one of 3.6, 3.8, which its kernels were compiled and tested with"
    chosen = choose(hopper_gpu)
    assert chosen.backend.name == "triton"
    assert chosen.refusals == (("hopper", reason),)
    with pytest.raises(NotImplementedError, match=reason):
        choose(hopper_gpu, "hopper")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(gluon_hopper, "mbarrier"), (gluon_hopper.tma, "store_wait")],
    ids=["mbarrier", "tma.store_wait"],
)
def test_a_triton_that_names_things_otherwise_is_a_reason_and_no_crash(hopper_gpu, monkeypatch, owner, name):
    for module in [module for module in sys.modules if module.startswith("ringflash.kernels.hopper.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    monkeypatch.delattr(owner, name)
    chosen = choose(hopper_gpu)
    assert chosen.backend.name == "triton"
    ((backend, reason),) = chosen.refusals
    assert backend == "hopper"
    assert reason.startswith("triton 3.9 has other names than 3.6 and 3.8: ")
    assert name in reason


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_scale_must_be_finite(scale):
    with pytest.raises(ValueError, match="must be finite"):
        Score(scale=scale)
    with pytest.raises(TypeError, match="must be a float"):
        Score(scale="1")


def test_a_score_fills_in_the_usual_scale_but_keeps_zero():
    assert rf.Score().resolve(64).factor == 0.125
    assert rf.Score(scale=0.0).resolve(64).factor == 0.0


def test_R18_a_head_dim_that_no_kernel_has_falls_to_the_reference_with_one_warning():
    wide = call(device=torch.device("cuda", 0), dtype=torch.float16, head_dim=512, value_dim=512)
    with pytest.warns(UserWarning, match="head_dim 512 is more than 256. The reference serves it"):
        assert choose(wide).backend.name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(wide).backend.name == "reference"
