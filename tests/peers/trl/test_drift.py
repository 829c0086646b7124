"""Changes planted in the real TRL and vLLM: what needs the changed thing is refused by name, and all else trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peers.scenarios import Run, named
from tests.planted import Edits, planted

scenarios = named("tests.peers.trl.scenarios_drift")

FLOAT32 = {"precision": {"dtype": "float32"}}
KL = {"kl": {"estimator": "k3"}}
R3 = {"routing": {"mode": "R3"}}
SHORT = {"max_steps": 1, "bf16": False, "beta": 0.05, "max_completion_length": 8}


# Package, planted change, blocks that are refused, with an engine to be started, with what their message begins with and names,
# and the block that trains, and how: an engine takes half a minute.
DRIFTS: dict[str, tuple[str, Edits, list[tuple[Any, str, str]], Any, dict[str, Any]]] = {
    "renamed-field": (
        "vllm",
        {
            "outputs.py": [("routed_experts", "expert_routes")],
            "v1/engine/output_processor.py": [("routed_experts=", "expert_routes=")],
        },
        [
            (
                {**FLOAT32, **R3},
                "mismatch.routing.mode='R3': vllm ",
                "vllm.outputs:CompletionOutput.routed_experts is not there.",
            )
        ],
        {**FLOAT32, **KL},
        SHORT,
    ),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_a_change_refuses_what_needs_it_before_the_engine_starts_and_all_else_trains(
    run: Run, dense: Path, tmp_path: Path, name: str
) -> None:
    package, edits, refused, block, overrides = DRIFTS[name]
    front = planted(tmp_path / "front", package, edits)
    found = run(
        scenarios.drifted, model=dense, out=tmp_path, refused=[asked for asked, _, _ in refused], block=block, asking=SHORT,
        env={"PYTHONPATH": str(front)}, fresh=True, **overrides,
    ).expect()  # fmt: skip
    assert len(found["messages"]) == len(refused), found["messages"]
    for message, (_, begins, says) in zip(found["messages"], refused, strict=True):
        assert message.startswith(f"SeamError: {begins}") and says in message, message
        assert "has changed" in message and "https://github.com/" in message
        assert message.endswith("Nothing was started.")
    assert (found["engines_before"], found["engines"]) == (0, int(overrides.get("use_vllm", True)))
    assert [set(entry) >= {"loss"} for entry in found["history"]] == [True]
