"""Right and wrong updates of both rollout engines' weights are told apart alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.versions import installed
from tests.peers.engines.sglang_environment import VERSIONS
from tests.peers.scenarios import Run, named

scenarios_conformance = named("tests.peers.engines.scenarios_conformance")

pytestmark = pytest.mark.engine
# `test_sglang.py` has some of this in every run, of an engine that it starts.
SGLANG = tuple(pytest.param(f"sglang {version}", marks=pytest.mark.nightly) for version in VERSIONS)
ENGINES = (*(["vllm"] if installed("vllm") else []), *SGLANG)


@pytest.fixture(scope="module")
def answers(
    run: Run, moe: Path, sglang_in_float32: Callable[[str, str], dict[str, Any]]
) -> Callable[[str], dict[str, Any]]:
    """Return a function: the verdicts on the same updates of an engine's weights."""

    @cache
    def found(engine: str) -> dict[str, Any]:
        if engine == "vllm":
            return dict(run(scenarios_conformance.vllm, model=moe).expect())
        return sglang_in_float32(engine.removeprefix("sglang "), "engine")

    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_good_stale_and_partial_updates_are_told_apart(answers: Callable[[str], dict[str, Any]], engine: str) -> None:
    found = answers(engine)["updates"]
    assert found["statuses"] == {
        "trained and sent": "in_sync", "sent again": "unchanged", "trained": "stale", "sent": "unchanged",
        "sent whole": "in_sync",
    }, found["messages"]  # fmt: skip
    # Of the last but one only the final norm was sent; fail closed, whichever way it is named.
    assert "weight update 5: " in found["a part sent"] and (
        "stale" in found["a part sent"] or "garbled" in found["a part sent"]
    )
    assert found["version"] == 5
    compared = "tensors are equal bit by bit" in found["messages"]["trained and sent"]
    assert compared == (engine == "vllm")  # SGLang's weights are out of reach
