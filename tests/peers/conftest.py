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
from tests.peers.forks import ROOT, run_forked, serve


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

    def run(
        name: str,
        timeout: float = 240,
        env: dict[str, str] | None = None,
        module: str = "trl.scenarios_training",
        **payload: Any,
    ) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", f"tests.peers.{module}", name, json.dumps(payload, default=str)],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **_rendezvous(), **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        result = json.loads(lines[-1].removeprefix("RESULT ")) if lines else None
        return Ran(done.returncode, result, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def run_in_verl() -> Callable[..., Ran]:
    """Return a function that runs a scenario of `verl.in_process` in a process of its own, which has imported verl."""
    package = "tests.peers.verl.in_process"
    serve(
        f"{package}.{module}"
        for module in ("scenarios_driver", "scenarios_losses", "scenarios_replay", "scenarios_training")
    )

    def run(module: str, name: str, timeout: float = 240, **payload: Any) -> Ran:
        return Ran(*run_forked(f"{package}.scenarios_{module}", name, payload, _rendezvous(), timeout))

    return run


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny dense checkpoint in float32."""
    return tiny_model("dense", tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny mixture-of-experts checkpoint in float32."""
    return tiny_model("moe", tmp_path_factory.mktemp("models") / "moe")


def _rendezvous() -> dict[str, str]:
    # The engine's own default is one port for all, which a process that is still ending may hold.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
