"""Runs a command as a reader of README and docs does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.rendezvous import rendezvous

ROOT = Path(__file__).resolve().parents[1]


def shell(command: str, timeout: float = 3400, **env: str) -> str:
    """Run a command in the checkout with its environment first on the path, and return what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **rendezvous(), "PATH": path, "HF_HUB_OFFLINE": "1", **env}
    bash = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(bash, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout
