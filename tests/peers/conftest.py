"""Models and a runner for tests with the real peers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ran:
    """How a scenario ended."""

    code: int
    result: Any
    stdout: str
    stderr: str

    def expect(self) -> Any:
        """Return the result of a scenario that must have succeeded."""
        assert self.code == 0, self.stderr[-4000:]
        return self.result


@pytest.fixture(scope="session")
def run_scenario() -> Callable[..., Ran]:
    """Return a function that runs a scenario in a process of its own, one heavy engine at a time."""

    def free_port() -> str:
        # The engine's own default is one port for all, which a process that is still ending may hold.
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return str(listener.getsockname()[1])

    def run(
        name: str, timeout: float = 240, env: dict[str, str] | None = None, module: str = "scenarios", **payload: Any
    ) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", f"tests.peers.{module}", name, json.dumps(payload, default=str)],
            cwd=ROOT,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": free_port(),
                **(env or {}),
            },
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        result = json.loads(lines[-1].removeprefix("RESULT ")) if lines else None
        return Ran(done.returncode, result, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny dense checkpoint in float32."""
    return tiny_model("dense", tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny mixture-of-experts checkpoint in float32."""
    return tiny_model("moe", tmp_path_factory.mktemp("models") / "moe")
