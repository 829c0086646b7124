"""Models and a runner for tests with the real peers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import tiny_model
from tests.peers.conformance import readiness
from tests.peers.scenarios import Forks, Ran, Run, Scenario, run_fresh
from tests.rendezvous import rendezvous

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def nobodys_rank() -> Iterator[None]:
    """Take back what makes this process one rank of several: programs that are started next would look for the others."""
    before = {name: os.environ.get(name) for name in LAUNCHED}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Return a function that runs a scenario in a process of its own, which has imported the peers already.

    Its arguments: the scenario; `timeout` in seconds; `env`, variables of the process; `fresh=True` for an interpreter that has
    imported nothing, for what the peers read when they are imported. All others are the scenario's.
    """
    forks = Forks()

    def run_one(
        scenario: Scenario,
        /,
        *,
        timeout: float = 240,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        **payload: Any,
    ) -> Ran:
        variables = {"HF_HUB_OFFLINE": "1", **rendezvous(), **(env or {})}
        if fresh:
            return run_fresh(scenario, payload, {**os.environ, **variables}, timeout)
        return forks.run(scenario, payload, variables, timeout)

    yield run_one
    forks.close()


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny dense checkpoint in float32."""
    return tiny_model("dense", tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny dense checkpoint in float32 with an output head of its own."""
    return tiny_model("dense", tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="session")
def dense_fp16(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny checkpoint in float16: where the CPU has no float16 products, stock TRL can update its engine."""
    out = tmp_path_factory.mktemp("models") / "dense-fp16"
    AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float16).save_pretrained(out)
    AutoTokenizer.from_pretrained(dense).save_pretrained(out)
    return out


@pytest.fixture(scope="session")
def risky(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny dense checkpoint that is risky in float16."""
    return readiness.risky(dense, tmp_path_factory.mktemp("models") / "risky")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny mixture-of-experts checkpoint in float32."""
    return tiny_model("moe", tmp_path_factory.mktemp("models") / "moe")
