"""Runs a command as a reader of README and docs does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from tests.rendezvous import rendezvous

ROOT = Path(__file__).resolve().parents[1]


def shell(command: str, timeout: float = 3400, statuses: Collection[int] = (0,), **env: str) -> str:
    """Run a command in the checkout with its environment first on the path, and return what it printed.

    It must end with one of the statuses. Of several commands, each but the last must end with 0.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **rendezvous(), "PATH": path, "HF_HUB_OFFLINE": "1", **env}
    bash = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(bash, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode in statuses, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout
