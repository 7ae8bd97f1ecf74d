"""Scripts as people start them, in processes of their own, for tests of what they print."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def output_of(*command, timeout_s=120):
    """What a command of this Python prints, in the repository's folder; an exit status other than 0 is a failure."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launched(processes, *command, timeout_s=120):
    """The same under torchrun, on loopback."""
    launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}"]
    return output_of("-m", *launcher, *command, timeout_s=timeout_s)
