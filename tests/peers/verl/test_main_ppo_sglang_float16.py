"""verl's own trainer with SGLang's servers: float16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.peers.engines.sglang_environment import MAIN
from tests.peers.verl.main_ppo_sglang import run_verl_sglang

pytestmark = pytest.mark.nightly

R3 = "+mismatch.routing.mode=R3"


def test_float16_with_replay_trains_experts(tmp_path: Path) -> None:
    """In verl with SGLang, a mixture of experts with replay trains in float16 with less than an eighth of bfloat16's k3."""
    model = tiny_model("moe", tmp_path / "model")
    half, brain = (
        run_verl_sglang(tmp_path / name, [f"+mismatch.precision={section}", R3], model=model, plugin=True, version=MAIN)
        for name, section in (("half", "{dtype:float16,init_scale:16}"), ("brain", "{dtype:bfloat16}"))
    )
    steps = half.expect()
    assert f"engine=sglang, version={MAIN}, model_dtype=float16" in half.log and "\n  audit " in half.log
    assert [step["mismatch/skipped_steps"] for step in steps] == [0.0] * 3
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    gaps = [[step["mismatch/k3_kl"] for step in run.expect()] for run in (half, brain)]
    # Bits say 64; a run that has a tenth of the effect has 7.3. No figure to quote: these are a few thousand tokens.
    assert 0 < 8 * sum(gaps[0]) < sum(gaps[1]), gaps
