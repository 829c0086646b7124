"""The block in verl's own trainer with SGLang's servers: every section at once, with tools, and an answer that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.peers.conformance.origins import check_header
from tests.peers.engines.sglang_environment import MAIN, OLDEST, stub_uses
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import VerlRun, lasting
from tests.peers.verl.main_ppo_sglang import run_verl_sglang
from tests.peers.verl.recorded import recorded, shape
from tests.peers.verl.test_main_ppo import FLOAT32_K3, TOOLS

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

R3 = "+mismatch.routing.mode=R3"
EVERYTHING = (
    "+mismatch.precision.dtype=float32",
    "+mismatch.routing={mode:R3,measured:1.0}",
    "+mismatch.correction.preset=decoupled_geo_rs_token_tis",
    "+mismatch.kl={coef:0.05,target_kl:0.01}",
    "+mismatch.lr.period=2",
)


@pytest.fixture(scope="module")
def ran(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[VerlRun, Path]:
    """Return three steps with every section and tools, and their folder; in a fourth, an answer lacks a log-probability."""
    work = tmp_path_factory.mktemp("sglang")
    env = {FAULT: "null_logprob@4"}
    overrides = [*EVERYTHING, *TOOLS, *lasting(4)]
    return run_verl_sglang(work, overrides, model=moe, plugin=True, version=OLDEST, env=env), work


def test_every_section_is_active_in_one_run(ran: tuple[VerlRun, Path]) -> None:
    run, work = ran
    steps = run.expect_failure(3)
    assert all(0 <= step[f"mismatch/{name}"] <= FLOAT32_K3 for step in steps for name in ("k3_kl", "native/k3_kl"))
    assert [step["mismatch/routing/set_mismatch_frac"] for step in steps] == [0.0] * 3
    assert all(step["mismatch/routing/compared_tokens"] > 100 for step in steps)
    assert [step["actor/lr"] for step in steps] == [1e-3, 1e-3, 5e-4]
    assert len({step["mismatch/kl_coef"] for step in steps}) > 1
    # A later turn comes from SGLang's radix cache; the tool's tokens are replayed and not counted.
    assert all(step["mismatch/routing/compared_tokens"] > step["mismatch/tokens"] for step in steps)
    # The actor learns, and the server's weights follow: the gap would be that of the update.
    assert steps[2]["mismatch/kl_ref_k3"] > 1e-6 > FLOAT32_K3 >= steps[2]["mismatch/k3_kl"]
    data = read_run(work / "checkpoints/mismatch")
    assert data.header["engine"]["engine"] == "sglang" and data.header["versions"]["sglang"] == OLDEST
    check_header(data.header, "sglang")
    used = stub_uses(work / "kernel-stub.log")
    assert used["fetched"] > 0 and used["called"] == 0


def test_an_answer_that_verl_would_drop_ends_the_run(ran: tuple[VerlRun, Path]) -> None:
    run, work = ran
    run.expect_failure(3)
    assert "EngineError: rollouts of step 4: 1 answers were refused" in run.log
    assert "NonFiniteLogprobError: request" in run.log and "output_token_logprobs[1]: found" in run.log
    assert [end.status for end in read_run(work / "checkpoints/mismatch").ends] == ["failed"]


def test_processes_report_what_is_recorded_of_them(ran: tuple[VerlRun, Path]) -> None:
    assert shape(ran[0].reports) == shape(recorded("sglang"))


def test_float16_with_replay_trains_experts(moe: Path, tmp_path: Path) -> None:
    """In verl with SGLang, a mixture of experts with replay trains in float16 with less than an eighth of bfloat16's k3."""
    half, brain = (
        run_verl_sglang(tmp_path / name, [f"+mismatch.precision={section}", R3], model=moe, plugin=True, version=MAIN)
        for name, section in (("half", "{dtype:float16,init_scale:16}"), ("brain", "{dtype:bfloat16}"))
    )
    steps = half.expect()
    assert f"engine=sglang, version={MAIN}, model_dtype=float16" in half.log
    assert [step["mismatch/skipped_steps"] for step in steps] == [0.0] * 3
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    gaps = [[step["mismatch/k3_kl"] for step in run.expect()] for run in (half, brain)]
    # Bits say 64; a run that has a tenth of the effect has 7.3. No figure to quote: these are a few thousand tokens.
    assert 0 < 8 * sum(gaps[0]) < sum(gaps[1]), gaps
