"""The block in verl's own trainer with SGLang's servers: every section at once, with tools, and an answer that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.peers.conformance.origins import check_header
from tests.peers.engines.sglang_environment import OLDEST, stub_uses
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import ANSWERS, PROMPTS, VerlRun, lasting
from tests.peers.verl.main_ppo_sglang import run_verl_sglang
from tests.peers.verl.recorded import recorded, shape
from tests.peers.verl.test_main_ppo import FLOAT32_K3, TOOLS, TURN_TOKENS, TURNS

pytestmark = pytest.mark.engine

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
    # The actor learns, and the server's weights follow: the gap would be that of the update.
    assert steps[2]["mismatch/kl_ref_k3"] > 1e-6 > FLOAT32_K3 >= steps[2]["mismatch/k3_kl"]
    assert "engine=sglang, model_dtype=float32" in run.log and "mode=R3" in run.log
    data = read_run(work / "checkpoints/mismatch")
    assert data.header["engine"]["engine"] == "sglang" and data.header["versions"]["sglang"] == OLDEST
    check_header(data.header, "sglang")
    used = stub_uses(work / "kernel-stub.log")
    assert used["fetched"] > 0 and used["called"] == 0


def test_tools_between_the_policys_turns_are_replayed_and_not_counted(ran: tuple[VerlRun, Path]) -> None:
    run, work = ran
    answers = PROMPTS * ANSWERS
    for step in run.expect_failure(3):
        # Prompt, three turns of the policy and two of the tool, whose problems such as 12+345= have seven tokens.
        assert step["num_turns/min"] == step["num_turns/max"] == 2 * TURNS
        assert answers * TURNS <= step["mismatch/tokens"] <= answers * TURNS * TURN_TOKENS
        assert step["response_length/mean"] * answers == step["mismatch/tokens"] + answers * (TURNS - 1) * 7
        # A later turn comes from SGLang's radix cache, but for the tool's tokens and the last one of the turn before.
        assert step["mismatch/routing/compared_tokens"] > step["mismatch/tokens"] + answers * (TURNS - 1) * 7
        assert step["mismatch/logp_abs_diff_max"] < 1e-4 and step["mismatch/logp_abs_diff_mean"] < 1e-5
    for profile in read_run(work / "checkpoints/mismatch").profiles:
        assert sum(profile.profiles["position"]["count"]) == run.steps[0]["mismatch/tokens"]


def test_an_answer_that_verl_would_drop_ends_the_run(ran: tuple[VerlRun, Path]) -> None:
    run, work = ran
    run.expect_failure(3)
    assert "EngineError: rollouts of step 4: 1 answers were refused" in run.log
    assert "NonFiniteLogprobError: request" in run.log and "output_token_logprobs[1]: found" in run.log
    assert [end.status for end in read_run(work / "checkpoints/mismatch").ends] == ["failed"]


def test_processes_report_what_is_recorded_of_them(ran: tuple[VerlRun, Path]) -> None:
    assert shape(ran[0].reports) == shape(recorded("sglang"))
