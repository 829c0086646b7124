"""The `correction` section in the real TRL with the real vLLM: native options driven, other weights in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

own = named("tests.peers.trl.scenarios_kl_terms")
scenarios = named("tests.peers.trl.scenarios_correction")

pytestmark = pytest.mark.engine


def test_a_preset_that_trl_has_is_trls_own(run: Run, dense: Path, tmp_path: Path) -> None:
    arguments = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.01}
    theirs = run(scenarios.trained, model=dense, out=tmp_path / "trl", block={}, **arguments).expect()
    block = {"correction": {"preset": "token_mask", "upper": 1.01}}
    # The scenario's own arguments name a mode; its default leaves it to the block.
    ours = run(
        scenarios.trained,
        model=dense,
        out=tmp_path / "ours",
        block=block,
        vllm_importance_sampling_mode="sequence_mask",
    ).expect()
    assert ours["history"] == theirs["history"] and ours["parameters"] == theirs["parameters"]
    assert ours["options"] == theirs["options"] and not ours["rollout_metrics"]


def test_trls_own_modes_are_certified_by_enumeration(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(own.corrections, model=str(dense), out=str(tmp_path)).expect()
    # Weights of whole responses give the gradient of the expected reward; the engine's log-probabilities arrive as float32.
    assert found.pop("unbounded")["bias"] < 1e-6 and len(found) == 4
    for mode, judged in found.items():
        assert judged["theirs"] == pytest.approx(judged["ours"], rel=1e-5, abs=1e-6), mode
        assert judged["theirs"]["bias"] > 0.01, mode
