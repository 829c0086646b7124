"""verl's own trainer with SGLang's servers: float16, and turns that are no more what the servers have sampled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.peers.engines.sglang_environment import MAIN
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import dtypes, lasting
from tests.peers.verl.main_ppo_sglang import run_verl_sglang
from tests.peers.verl.test_main_ppo import TOOLS

pytestmark = pytest.mark.nightly

R3 = "+mismatch.routing.mode=R3"


def test_float16_with_replay_trains_experts(tmp_path: Path) -> None:
    """In verl with SGLang, a mixture of experts with replay trains in float16 with less than an eighth of bfloat16's k3."""
    model = tiny_model("moe", tmp_path / "model")
    half, brain = (
        run_verl_sglang(tmp_path / name, [f"+mismatch.precision={section}", R3], model=model, plugin=True, version=MAIN)
        for name, section in (("half", "{dtype:float16,loss_scale:{init_scale:16}}"), ("brain", "{dtype:bfloat16}"))
    )
    steps = half.expect()
    assert f"sglang {MAIN}, float16" in half.log and "uniform float16: audited on both sides" in half.log
    assert [step["mismatch/skipped_steps"] for step in steps] == [0.0] * 3
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    gaps = [[step["mismatch/k3_kl"] for step in run.expect()] for run in (half, brain)]
    # Bits say 64; a run that has a tenth of the effect has 7.3. No figure to quote: these are a few thousand tokens.
    assert 0 < 8 * sum(gaps[0]) < sum(gaps[1]), gaps


def test_turns_that_were_not_sampled_so_end_the_run_by_name(tmp_path: Path) -> None:
    """In verl with SGLang and tools, a turn tokenised anew, a dropped one and turns of two weight versions are named."""
    model = tiny_model("moe", tmp_path / "model")
    overrides = [R3, *dtypes("float32"), *TOOLS, *lasting(2)]
    run = run_verl_sglang(
        tmp_path / "run", overrides, model=model, plugin=True, version=MAIN, env={FAULT: "spoiled_turns@2"}
    )
    run.expect_failure(1)
    assert "RecordError: 3 of 16 rollouts of step 2 are not what the servers sampled." in run.log
    for words in (
        r"RecordError: completion \S+_0_0: token 0 of the completion was changed after turn 0 had sampled it: id \d+ by the",
        r"RecordError: completion \S+_1_0: turn 1 was dropped: the engine sampled \d tokens behind token \d+ of the completion",
        r"ProvenanceError: completion \S+_2_0: turn 0 was sampled by weight version 1, turn 1 by weight version 2: the engine's",
    ):
        assert re.search(words, run.log), run.log[-6000:]
    assert (tmp_path / "run/checkpoints/global_step_1/mismatch.json").is_file()
