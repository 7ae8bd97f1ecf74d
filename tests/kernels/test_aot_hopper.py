"""The Hopper kernels compile without a GPU under each Triton that they know, within stated limits."""

import json
import os
import subprocess
import sys

import pytest
import triton

import dev
from ringflash.testing import aot_hopper

REGISTERS = 65536  # of a multiprocessor, for all threads of a block
SHARED_BYTES = 227 * 1024
# Bytes that a thread may spill, stated from what each release makes of the kernels. A change that spills more must be
# measured on a device first, and says so here.
SPILLED = {
    "3.6": {
        ("forward", "d64"): 24,
        ("forward", "d128"): 40,
        ("forward waiting", "d128"): 32,
        ("forward", "d192/128"): 0,
        ("forward", "d256"): 184,
        ("backward", "d64"): 56,
        ("backward", "d128"): 32,
        ("backward waiting", "d64"): 72,
        ("backward waiting", "d128"): 64,
        ("keys", "d64"): 32,
        ("keys", "d128"): 32,
        ("keys", "d192/128"): 0,
        ("keys", "d256"): 0,
        ("queries", "d64"): 0,
        ("queries", "d128"): 0,
        ("queries", "d192/128"): 0,
        ("queries", "d256"): 0,
    },
    "3.8": {
        ("forward", "d64"): 48,
        ("forward", "d128"): 32,
        ("forward waiting", "d128"): 40,  # outside of loops; no device with this release was there to measure on
        ("forward", "d192/128"): 0,
        ("forward", "d256"): 400,
        ("backward", "d64"): 0,
        ("backward", "d128"): 8,
        ("backward waiting", "d64"): 0,
        ("backward waiting", "d128"): 40,
        ("keys", "d64"): 0,
        ("keys", "d128"): 8,
        ("keys", "d192/128"): 0,
        ("keys", "d256"): 0,
        ("queries", "d64"): 0,
        ("queries", "d128"): 0,
        ("queries", "d192/128"): 0,
        ("queries", "d256"): 0,
    },
}
# Loads and stores of it in the loops over blocks that a mask cuts. In the loops over all others, where the time goes, and
# in those of backward there is none, but for a few where bounds are read.
SPILLS_IN_UNMASKED_LOOPS = {
    "3.6": {("backward", "d64"): 26, ("backward waiting", "d64"): 27, ("backward waiting", "d128"): 5},
    "3.8": {("backward", "d128"): 2, ("backward waiting", "d128"): 8, ("keys", "d128"): 2},
}
SPILLS_IN_MASKED_LOOPS = {
    "3.6": {("forward", "d128"): 8, ("forward waiting", "d128"): 4, ("forward", "d256"): 2},
    "3.8": {("forward", "d128"): 16, ("forward waiting", "d128"): 16},
}
# (release, variant) -> why it does not compile. An entry that is no longer needed fails.
BROKEN: dict[tuple[str, str], str] = {}


def environment_with(version):
    """The environment variables under which Python imports this release of Triton; skips where it is not installed."""
    paths = [str(dev.ROOT)]
    if dev.release_of(version) != dev.release_of(triton.__version__):
        folder = dev.OTHER_TRITON / version
        if not folder.exists():
            pytest.skip(
                f"triton {version} is neither this one ({triton.__version__}) nor in {folder}, where `dev.py test` puts it "
                "on Linux machines without a GPU"
            )
        paths.insert(0, str(folder))
    # Kernels imported under Triton's interpreter cannot be compiled.
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def usages(version, direction):
    done = subprocess.run(
        [sys.executable, "-m", "ringflash.testing.aot_hopper", direction],
        capture_output=True,
        text=True,
        env=environment_with(version),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {dev.release_of(line["triton"]) for line in lines} == {dev.release_of(version)}
    return lines, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("version", dev.TRITONS)
def test_every_launch_compiles_within_its_limits(version, direction):
    release = dev.release_of(version)
    lines, errors = usages(version, direction)
    assert [line["name"] for line in lines] == [variant.name for variant in aot_hopper.variants(direction)]
    broken = {line["name"]: line["error"] for line in lines if "error" in line}
    known = {
        name for where, name in BROKEN if where == release and name.startswith("forward") == (direction == "forward")
    }
    assert set(broken) == known, f"triton {version} does not compile {broken}, expected {known}: {errors[-3000:]}"
    wrong = [complaint for line in lines if "error" not in line for complaint in complaints(release, line)]
    assert not wrong, "\n".join([f"triton {version}:", *wrong])


def complaints(release, usage):
    """What is beyond its limit, in sentences."""
    name, loops = usage["name"], usage["loops"]
    direction, dims, _, shape = name.split()[:4]
    # A loop for blocks that show all and one for each end that a mask can hide, in each warpgroup.
    warpgroups = 3 if direction == "forward" and dims == "d64" and (shape == "full" or "long" in name) else 2
    count = warpgroups * (1 if direction != "forward" else 3 if shape == "rows" else 2)
    if name.endswith("waiting"):
        direction = f"{direction} waiting"
    spilled = SPILLED[release][direction, dims]
    if usage["registers"] * usage["threads"] > REGISTERS:
        yield f"{name}: {usage['threads']} threads of {usage['registers']} registers; a block has {REGISTERS}"
    if usage["shared_bytes"] > SHARED_BYTES:
        yield f"{name}: {usage['shared_bytes']} bytes of shared memory; a block has {SHARED_BYTES}"
    if usage["spilled_bytes"] > spilled:
        yield f"{name}: spills {usage['spilled_bytes']} bytes per thread; the limit is {spilled}"
    if usage["is_serialized"]:
        yield f"{name}: ptxas waits after each product, because an accumulator is used before its product is waited for"
    if len(loops) != count:
        yield f"{name}: {len(loops)} loops hold products; it should be {count}"
    # Masks only add instructions: the shortest loop of each warpgroup is the one without.
    unmasked, masked = loops_by_length(loops, warpgroups)
    if sum(loop["spills"] for loop in unmasked) > SPILLS_IN_UNMASKED_LOOPS[release].get((direction, dims), 0):
        yield f"{name}: spills in the loop over blocks that no mask touches: {unmasked}"
    if sum(loop["spills"] for loop in masked) > SPILLS_IN_MASKED_LOOPS[release].get((direction, dims), 0):
        yield f"{name}: spills in loops over masked blocks: {masked}"


def loops_by_length(loops, warpgroups):
    ordered = sorted(loops, key=lambda loop: loop["instructions"])
    return ordered[:warpgroups], ordered[warpgroups:]
