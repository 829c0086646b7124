"""`mismatch.level: observe` with the real TRL and vLLM: the run is stock's to the last bit, and every failed check is named."""

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

# Check, kind, and words of the error that enforce raises.
EXPERTS = [
    ("objective_settings", "stop", "mismatch.kl.reward_path='rewards' with mask_truncated_completions=True"),
    ("sampling", "stop", "generation_kwargs['temperature']=0.5 but temperature=1.0"),
    ("precision", "apply", "engine dtype: expected float32, found bfloat16"),
    ("weight_sync", "stop", "garbled"),
    ("routes", "stop", "vLLM returned no routing"),
    ("routes", "stop", "all expert ids are zero"),
    ("routes", "stop", "1 missing"),
    ("routes", "stop", "layers are swapped"),
    ("alarm", "stop", "reward is"),
]
DENSE = [
    ("objective_settings", "stop", "vllm_importance_sampling_correction=False contradicts mismatch.correction"),
    ("routing", "stop", "qwen3: no module of the model has experts"),
    ("precision", "apply", "trainer parameters: expected float32, found bfloat16"),
    ("readiness", "stop", "up_proj"),
    ("weight_sync", "stop", "stale"),
    ("records", "stop", "rollout 3, token 1"),
    ("records", "stop", "the tokens to be trained on are not those that the engine sampled"),
    ("checkpoint", "stop", "is damaged"),
    ("metrics", "failed", "ZeroDivisionError: a mistake of our own"),
]


def check_stock(found: dict[str, Any], steps: int) -> None:
    """Hold an observed run against stock TRL: loss and every other number of its log, weights and random numbers."""
    stock, observed = found["stock"], found["observe"]
    assert len(stock["log"]) == steps and any(entry["grad_norm"] > 0 for entry in stock["log"])
    for name in ("log", "parameters", "rng"):
        assert observed[name] == stock[name], name
    assert set(found["end"]) == {"completed"}


def check_named(found: dict[str, Any], faults: list[tuple[str, str, str]]) -> None:
    """Look for each fault in metrics.jsonl, in the trainer's log and in the report."""
    for check, kind, words in faults:
        told = [f for f in found["findings"] if (f["check"], f["kind"]) == (check, kind) and words in f["message"]]
        assert told, (check, kind, words, [f["message"] for f in found["findings"] if f["check"] == check])
        assert found["observe"]["ours"][-1][f"mismatch/observed/{check}"] >= 1
        assert f"<td>{check}</td>" in found["report"]
    assert "Enforce would have stopped at step 0" in found["report"]


@pytest.mark.numeric
def test_every_section_observes_and_none_acts(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.sections, model=moe, out=tmp_path).expect()
    check_stock(found, steps=3)
    # What the block would have set is no fault; all else is in order.
    assert {(f["check"], f["kind"]) for f in found["findings"]} == {("precision", "apply")}
    assert "enforce would not have stopped" in found["report"]
    ours = found["observe"]["ours"]
    assert [entry["mismatch/enforce/lr_multiplier"] for entry in ours] == [1.0, 1.0, 0.5]
    for entry in ours:
        # Of the engine, whose routes were recorded in a run whose numbers are stock's.
        assert entry["mismatch/routing/compared_tokens"] > 0
        assert 0 < entry["mismatch/k3_kl"] and entry["mismatch/enforce/rollout_is_mean"] > 0
    assert ours[1]["mismatch/enforce/kl_ref_k1"] != 0 and ours[1]["mismatch/enforce/kl_coef"] == 0.1
    # A batch was examined beside the run.
    assert "no cause is named" in dict(found["events"])["doctor"] and "Why the two sides differ" in found["report"]
    sets = dict(found["events"])["enforce_sets"]
    assert "vllm_importance_sampling_clip_max=1e+30 (is 3.0)" in sets


@pytest.mark.numeric
def test_faults_of_an_engine_with_experts_are_named_and_change_nothing(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.moe, model=moe, out=tmp_path).expect()
    check_stock(found, steps=4)
    check_named(found, EXPERTS)
    assert found["observe"]["ours"][-1]["mismatch/observed/weight_sync"] == 4


@pytest.mark.numeric
def test_faults_of_a_dense_model_are_named_and_change_nothing(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.dense, model=dense, out=tmp_path).expect()
    check_stock(found, steps=4)
    check_named(found, DENSE)


@pytest.mark.numeric
def test_a_callback_that_observes_leaves_rate_and_run_alone(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.callback, model=dense, out=tmp_path).expect()
    stock, observed = found["stock"], found["observe"]
    assert len(stock["log"]) == 3
    for name in ("log", "parameters", "rng"):
        assert observed[name] == stock[name], name
    assert [entry["mismatch/enforce/lr_multiplier"] for entry in observed["ours"]] == [1.0, 0.5, 0.25]
    assert {("sections", "stop"), ("alarm", "stop")} == {tuple(finding) for finding in found["findings"]}
