"""The block in verl's own trainer with SGLang's servers: routes, one dtype on both sides, and answers that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.rundata import read_run
from tests.peers.engines.sglang_environment import MAIN, OLDEST, stub_uses
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import TIMED_OUT, dtypes
from tests.peers.verl.main_ppo_sglang import run_verl_sglang

pytestmark = pytest.mark.engine

EVERYTHING = (
    "+mismatch.precision.dtype=float32",
    "+mismatch.routing={mode:R3,agreement_rate:1.0,native_gap_rate:1.0}",
    "+mismatch.correction.preset=decoupled_geo_rs_token_tis",
    "+mismatch.kl={coef:0.05,controller:{target_kl:0.01}}",
    "+mismatch.lr.period=2",
)


def test_every_section_is_active_in_one_run(moe: Path, tmp_path: Path) -> None:
    run = run_verl_sglang(tmp_path, EVERYTHING, model=moe, plugin=True, version=OLDEST)
    steps = run.expect()
    assert all(0 <= step["mismatch/k3_kl"] <= 1e-6 and step["mismatch/native/k3_kl"] <= 1e-6 for step in steps)
    assert [step["mismatch/routing/set_mismatch_frac"] for step in steps] == [0.0] * 3
    assert all(step["mismatch/routing/compared_tokens"] > 100 for step in steps)
    assert [step["actor/lr"] for step in steps] == [1e-3, 1e-3, 5e-4]
    assert len({step["mismatch/kl_coef"] for step in steps}) > 1
    # The actor learns, and the server's weights follow: the gap would be that of the update.
    assert steps[2]["mismatch/kl_ref_k3"] > 1e-6 > steps[2]["mismatch/k3_kl"]
    assert f"\n  engine     sglang {OLDEST}, float32" in run.log and "recorded by sglang, replayed in" in run.log
    data = read_run(tmp_path / "checkpoints/mismatch")
    assert data.header["engine"]["engine"] == "sglang" and data.header["versions"]["sglang"] == OLDEST
    assert [end.status for end in data.ends] == ["completed"]
    used = stub_uses(tmp_path / "kernel-stub.log")
    assert used["fetched"] > 0 and used["called"] == 0


def test_float16_with_replay_trains_experts(moe: Path, tmp_path: Path) -> None:
    block = ["+mismatch.precision={dtype:float16,loss_scale:{init_scale:16}}", "+mismatch.routing.mode=R3"]
    run = run_verl_sglang(tmp_path, block, model=moe, plugin=True, version=MAIN)
    steps = run.expect()
    assert f"sglang {MAIN}, float16" in run.log and "uniform float16: audited on both sides" in run.log
    assert [step["mismatch/skipped_steps"] for step in steps] == [0.0] * 3
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    # Under bfloat16 it is 1e-4 on this model.
    assert all(0 < step["mismatch/k3_kl"] < 2e-5 for step in steps)


def test_an_answer_that_verl_would_drop_ends_the_run(dense: Path, tmp_path: Path) -> None:
    overrides = [*dtypes("float32"), "+mismatch.monitor={}"]
    run = run_verl_sglang(tmp_path, overrides, model=dense, plugin=True, env={FAULT: "null_logprob"})
    assert run.code not in (0, TIMED_OUT), run.log[-6000:]
    assert "EngineError: rollouts of step 1: 1 answers were refused" in run.log
    assert "NonFiniteLogprobError: request" in run.log and "output_token_logprobs[1][0]: found None" in run.log
    assert run.steps == []
