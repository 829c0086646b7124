"""The `correction` section in the real TRL with the real vLLM: native options driven, other weights in their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mismatch_ext.ranks import ONE_PROCESS
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


def test_a_clip_on_the_engines_ratio_is_warned_of_where_the_engine_is_coarser() -> None:
    from mismatch_ext.adapters.trl.correction import coarse_engine

    assert "phantom_clip_frac" in str(coarse_engine("float32", "bfloat16", None))
    assert "fp8 weights" in str(coarse_engine("bfloat16", "bfloat16", "fp8"))
    assert coarse_engine("bfloat16", "float32", None) is None


def test_what_rejected_responses_add_to_the_advantages_of_the_others_is_measured() -> None:
    from mismatch_ext.adapters.trl.correction import baseline_shift

    rewards = torch.tensor([[1.0, 1, 1, 100], [1, 2, 3, 4]])
    output = {
        "prompt_ids": torch.tensor([[0, 5]] * 4 + [[6, 7]] * 4),
        "prompt_mask": torch.tensor([[0, 1]] * 4 + [[1, 1]] * 4),
        "advantages": (rewards - rewards.mean(1, keepdim=True)).flatten(),
        "importance_sampling_ratio": torch.ones(8, 2),
    }
    mask = torch.ones(8, 2)
    assert baseline_shift(output, mask, ONE_PROCESS) == 0
    output["importance_sampling_ratio"][3] = 0
    # The three that are kept, of seven rows, lose the 24.75 that the fourth has added to their mean.
    assert baseline_shift(output, mask, ONE_PROCESS) == pytest.approx(3 / 7 * 24.75)
