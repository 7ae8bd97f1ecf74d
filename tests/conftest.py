"""Fixtures shared by all tests."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if HAS_GPU:
    # Processes of pytest-xdist share the GPUs there are.
    torch.cuda.set_device(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % torch.cuda.device_count())
else:
    # Read when kernels are decorated: before anything imports them.
    os.environ["TRITON_INTERPRET"] = "1"

# Tensors are small and ranks are threads or processes of their own. A second thread per operation only waits, and where
# other work shares the cores it made 64k tokens take 79 s instead of 12.
torch.set_num_threads(1)

from ringflash import resolved  # noqa: E402
from ringflash.testing.poison import poisoned  # noqa: E402
from ringflash.testing.workers import Workers  # noqa: E402


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` exist only where there is one, those marked `interpreter` only where there is none."""
    absent = "interpreter" if HAS_GPU else "gpu"
    config.hook.pytest_deselected(items=[item for item in items if absent in item.keywords])
    items[:] = [item for item in items if absent not in item.keywords]


@pytest.fixture(autouse=True)
def _no_lucky_zeros():
    """torch.empty is full of NaN in every test: what is read was written."""
    with poisoned():
        yield


@pytest.fixture(autouse=True)
def _nothing_resolved():
    """What attention() found for a kind of call, tests that replace its parts must see found again."""
    resolved._ALONE.resolved.clear()


@pytest.fixture(autouse=HAS_GPU)
def _no_cached_memory():
    """What one process keeps for later, others miss: the fp64 oracle leaves gigabytes of it behind on a GPU."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def own_workers():
    """Makes processes for this module alone, `own_workers(4)`. Where only some ranks make a group, as flattening a mesh of
    some does, the next one that all make waits for ever: torch names a group by how many a process has made.
    """
    made = {}
    yield lambda size: made.setdefault(size, Workers(size))
    for workers in made.values():
        workers.stop()


@pytest.fixture(scope="session")
def workers():
    """Eight gloo processes; tests use sub-groups of them, so that group rank and global rank differ."""
    with Workers(8) as pool:
        yield pool


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param
