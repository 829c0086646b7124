"""`mismatch.level: observe` with the real TRL and vLLM: the run is stock's to the last bit, and every failed check warns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_observe as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_observe")

pytestmark = pytest.mark.engine

# Check, and words of the error that enforce raises.
FAULTS = [
    ("settled_settings", "generation_kwargs['temperature']=0.5 but temperature=1.0"),
    ("weight_sync", "stale"),
    ("records", "rollout 3, token 1"),
    ("records", "the tokens to be trained on are not those that the engine sampled"),
    ("alarm", "reward is"),
    ("checkpoint", "is damaged"),
    ("metrics", "ZeroDivisionError: a mistake of our own"),
]


def check_stock(found: dict[str, Any], steps: int) -> None:
    """Compare an observed run with stock TRL: every number of its log, weights and random numbers."""
    stock, observed = found["stock"], found["observe"]
    assert len(stock["log"]) == steps and any(entry["grad_norm"] > 0 for entry in stock["log"])
    for mine, theirs in zip(observed["log"], stock["log"], strict=True):
        assert mine == theirs, {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
    for name in ("log", "parameters", "rng"):
        assert observed[name] == stock[name], name


@pytest.mark.numeric
@pytest.mark.parametrize("rloo", [False, True])
def test_no_section_acts_and_the_gap_is_measured(run: Run, moe: Path, tmp_path: Path, rloo: bool) -> None:
    found = run(scenarios.sections, model=moe, out=tmp_path, rloo=rloo).expect()
    check_stock(found, steps=3)
    assert set(found["end"]) == {"completed"} and not found["findings"] and "No check failed." in found["report"]
    for entry in found["observe"]["ours"]:
        assert entry["mismatch/k3_kl"] > 0 and not {"mismatch/lr_multiplier", "mismatch/kl_coef"} & set(entry)
    assert found["observe"]["ours"][-1]["mismatch/weight_sync_gap"] >= 0


@pytest.mark.numeric
def test_every_failed_check_warns_and_changes_nothing(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.faults, model=dense, out=tmp_path).expect()
    check_stock(found, steps=4)
    assert set(found["end"]) == {"completed"}
    for check, words in FAULTS:
        told = [f["message"] for f in found["findings"] if f["check"] == check]
        assert any(words in message for message in told), (check, words, told)
        assert found["observe"]["ours"][-1][f"mismatch/observed/{check}"] >= 1
        assert f"<td>{check}</td>" in found["report"]


@pytest.mark.numeric
def test_a_callback_that_observes_leaves_rate_and_run_alone(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.callback, model=dense, out=tmp_path).expect()
    check_stock(found, steps=3)
    assert {finding["check"] for finding in found["findings"]} == {"alarm"}
