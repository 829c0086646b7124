"""The `correction` section in the real TRL with the real vLLM: native options driven, other weights in their place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from mismatch_ext.ranks import ONE_PROCESS
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_correction as scenarios
    from tests.peers.trl import scenarios_kl_terms as own
else:
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


def test_what_a_clip_on_the_engines_ratio_stops_is_that_of_loops_over_tokens(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    found = run(scenarios.phantom_by_hand, model=dense, out=tmp_path).expect()
    assert found["logged"] == pytest.approx(found["by_hand"], rel=1e-3, abs=1e-7)
    assert 0 < found["logged"]["phantom_clip_frac"] < 1 and found["without"] < found["of_each"]


def test_trls_own_modes_are_certified_by_enumeration(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(own.corrections, model=str(dense), out=str(tmp_path)).expect()
    # Weights of whole responses give the gradient of the expected reward; the engine's log-probabilities arrive as float32.
    assert found.pop("unbounded")["bias"] < 1e-6 and len(found) == 4
    for mode, judged in found.items():
        assert judged["theirs"] == pytest.approx(judged["ours"], rel=1e-5, abs=1e-6), mode
        assert judged["theirs"]["bias"] > 0.01, mode


@pytest.mark.parametrize(
    ("trainer", "engine", "quantization", "words"),
    [
        ("float32", "bfloat16", None, ["bfloat16", "float32", "phantom_clip_frac", "decoupled_token_is"]),
        ("bfloat16", "bfloat16", "fp8", ["fp8 weights", "bfloat16"]),
        ("float32", "float16", None, ["float16"]),
    ],
)
def test_a_clip_on_the_engines_ratio_is_warned_of_where_the_engine_is_coarser(
    trainer: str, engine: str, quantization: str | None, words: list[str]
) -> None:
    from mismatch_ext.adapters.trl.correction import coarse_engine

    said = coarse_engine(trainer, engine, quantization)
    assert said is not None and all(word in said for word in words)
    assert coarse_engine(engine, engine, None) is None and coarse_engine(engine, "float32", None) is None


@pytest.mark.parametrize(
    ("correction", "overrides", "words"),
    [
        ({"preset": "tokn_mask"}, {}, ["'tokn_mask'", "Did you mean 'token_mask'?"]),
        (
            {"preset": "token_mask"},
            {"vllm_importance_sampling_mode": "token_truncate"},
            ["token_truncate", "token_mask"],
        ),
        ({"preset": "decoupled_geo_rs"}, {"loss_type": "vespo"}, ["vespo", "token_truncate"]),
        ({"preset": "token_mask"}, {"use_vllm": False}, ["use_vllm=False", "mismatch.correction"]),
        ({}, {}, ["mismatch.correction is empty"]),
        ({"bound": "mask"}, {}, ["bound alone corrects nothing"]),
        ({"preset": "bypass_ppo_clip", "level": "token", "upper": 2.0}, {}, ["takes no weights", "reinforce"]),
        ({"preset": "bypass_pg_is"}, {"top_entropy_quantile": 0.2}, ["reinforce", "top_entropy_quantile"]),
        ({"preset": "bypass_pg_is", "off_policy_threshold": 0.5}, {}, ["reinforce", "off_policy_mask_threshold"]),
        ({"preset": "bypass_pg_is"}, {"loss_type": "cispo"}, ["reinforce", "loss_type"]),
        (
            {"preset": "bypass_pg_is"},
            {"importance_sampling_level": "sequence"},
            ["reinforce", "importance_sampling_level"],
        ),
        ({"preset": "bypass_pg_is", "normalize": True}, {}, ["normalize", "micro-batch"]),
    ],
)
def test_contradictions_are_refused(
    correction: dict[str, object], overrides: dict[str, object], words: list[str]
) -> None:
    from mismatch_ext.adapters.trl import MismatchGRPOConfig

    from mismatch_ext.errors import ConfigError

    given = {"use_vllm": True, "vllm_mode": "colocate", **overrides}
    with pytest.raises(ConfigError) as error:
        MismatchGRPOConfig(output_dir="x", use_cpu=True, bf16=False, mismatch={"correction": correction}, **given)
    assert all(word in str(error.value) for word in words), error.value


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
