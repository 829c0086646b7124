"""verl's own trainer as PPO, with every section of a block at once, on experts and with tools.

A fault strikes after the steps that are looked at: what it must lead to costs no run of its own. Whatever fails in one of verl's
processes ends the run, with an error that says what it was. Refusals of what processes report are in
`test_reports.py`; the dense model, in float16 by examples/verl_grpo.sh, in `test_main_ppo_example.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mismatch_ext.doctor import read_rollouts
from mismatch_ext.log_reading import read_run
from tests.peers.conformance.origins import check_header
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import (
    ANSWERS,
    PPO,
    PROMPTS,
    VerlRun,
    lasting,
    run_verl,
)
from tests.peers.verl.recorded import recorded, shape

pytestmark = pytest.mark.engine

# Half the square of 256 roundings: trainer and engine sum the same float32 products in other orders. A run leaves 3e-13, and one
# in bfloat16 1e-4.
FLOAT32_K3 = 0.5 * (256 * torch.finfo(torch.float32).eps) ** 2

# Every section. The coefficient adapts from the first step on, and the rate is halved at every second.
EVERYTHING = (
    "+mismatch.precision.dtype=float32",
    "+mismatch.routing={mode:R3,measured:1.0}",
    "+mismatch.correction.preset=decoupled_geo_rs_token_tis",
    "+mismatch.kl={coef:0.05,target_kl:0.01}",
    "+mismatch.lr.period=2",
    "+mismatch.monitor={alarms:{response_length/mean:{above:1e-9,patience:2}}}",
)

TURNS, TURN_TOKENS = 3, 8  # as `cpu/agent_loop.py` has them, which imports verl
# Three turns of the policy, and two answers of a tool between them, in 40 tokens.
TOOLS = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=seeded_tools",
    "data.max_response_length=40",
)

# As `cpu/derived.py` has them, which imports verl.
DERIVED, DERIVED_IN = "VERL_CPU_DERIVED", "tests.peers.verl.cpu.derived"
DERIVED_CLASSES = (
    f"+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls={DERIVED_IN}.OwnExtension",
    f"++actor_rollout_ref.rollout.agent.agent_loop_manager_class={DERIVED_IN}.OwnLoopManager",
    f"trainer.checkpoint_callback_class={DERIVED_IN}.OwnCallback",
)

# verl's default, and that of most of its recipes.
FSDP1 = ("actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.ref.strategy=fsdp")


@pytest.fixture(scope="module")
def experts(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[VerlRun, Path]:
    """Return three steps with every section, on experts with FSDP1 and with tools, and their folder.

    The rollout ignores the weights after the third, which is to be told and not to end the run; in the fourth, routes are lost.
    """
    work = tmp_path_factory.mktemp("experts")
    overrides = [*EVERYTHING, *PPO, *FSDP1, *TOOLS, *DERIVED_CLASSES, "+mismatch.monitor.weight_sync=warn"]
    overrides += [*lasting(4), "trainer.save_freq=3"]
    env = {FAULT: "all_routes_lost@4,stale_weights@3", DERIVED: str(work / "derived")}
    return run_verl(work, overrides, model=moe, plugin=True, env=env), work


def test_every_section_is_active_in_one_run(experts: tuple[VerlRun, Path]) -> None:
    run, work = experts
    steps = run.expect_failure(3)
    for section in ("precision", "routing", "lr", "kl", "correction", "monitor", "alarms"):
        assert f"\n  {section}" in run.log, run.log[-6000:]
    assert all(0 <= step[f"mismatch/{name}"] <= FLOAT32_K3 for step in steps for name in ("k3_kl", "native/k3_kl"))
    assert [step["mismatch/routing/set_mismatch_frac"] for step in steps] == [0.0] * 3
    assert all(step["mismatch/routing/compared_tokens"] > 100 for step in steps)
    assert [step["mismatch/lr_multiplier"] for step in steps] == [1.0, 1.0, 0.5]
    assert [step["actor/lr"] for step in steps] == [1e-3, 1e-3, 5e-4]
    assert len({step["mismatch/kl_coef"] for step in steps}) > 1
    # Before the first update the policy is its reference, up to float32's roundings.
    assert steps[0]["mismatch/kl_ref_k3"] <= FLOAT32_K3 < 1e-6 < steps[2]["mismatch/kl_ref_k3"]
    data = read_run(work / "checkpoints/mismatch")
    assert [step.step for step in data.steps] == [1, 2, 3]
    assert {"precision", "routing", "correction", "kl", "lr", "monitor"} == set(data.header["config"])
    patched = {patch["name"] for patch in data.header["patches"]}
    assert {"verl/validate_config", "verl/guard"} <= patched
    check_header(data.header, "vllm")
    (alarm,) = [event for event in data.events if event.name == "alarm"]
    assert (alarm.step, alarm.data["metric"]) == (2, "response_length/mean")


def test_a_critic_learns_beside_the_actor_at_its_own_rate_and_validation_takes_no_step(
    experts: tuple[VerlRun, Path],
) -> None:
    run, work = experts
    steps = run.expect_failure(3)
    assert [step["critic/lr"] for step in steps] == [1e-3] * 3  # the actor's is halved at the third
    assert all(step["critic/grad_norm"] > 0 for step in steps)
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if any(name.startswith("val-core/") for name in line["data"])] == [0, 2]


def test_a_users_classes_stay_in_their_places(experts: tuple[VerlRun, Path]) -> None:
    _, work = experts
    said = set((work / "derived").read_text(encoding="utf-8").split())
    assert said == {"OwnExtension", "OwnLoopManager", "OwnCallback/3/global_step_3"}


def test_tools_between_the_policys_turns_are_replayed_and_not_counted(experts: tuple[VerlRun, Path]) -> None:
    run, work = experts
    steps = run.expect_failure(3)
    answers = PROMPTS * ANSWERS
    for step in steps:
        # Prompt, three turns of the policy and two of the tool.
        assert step["num_turns/min"] == step["num_turns/max"] == 2 * TURNS
        assert answers * TURNS <= step["mismatch/tokens"] <= answers * TURNS * TURN_TOKENS
        # The tool writes problems such as 12+345=, of seven tokens each.
        assert step["response_length/mean"] * answers == step["mismatch/tokens"] + answers * (TURNS - 1) * 7
        # All tokens before the last are compared, prompt and tools included.
        assert step["mismatch/routing/compared_tokens"] > step["mismatch/tokens"]
        assert step["mismatch/logp_abs_diff_max"] < 1e-4 and step["mismatch/logp_abs_diff_mean"] < 1e-5


def test_rows_are_kept_of_the_batch_of_an_alarm_and_of_one_that_is_refused(experts: tuple[VerlRun, Path]) -> None:
    run, work = experts
    run.expect_failure(3)
    folder = work / "checkpoints/mismatch"
    assert sorted(path.name for path in folder.glob("evidence-*")) == ["evidence-2.jsonl.gz", "evidence-4.jsonl.gz"]
    alarmed, refused = (read_rollouts(folder / f"evidence-{step}.jsonl.gz") for step in (2, 4))
    assert len(alarmed.responses) == len(refused.responses) == PROMPTS * ANSWERS
    for row in alarmed.responses:
        assert (row.step, row.version) == ("1", "1") and row.routes is not None and row.kept is not None
        assert "response_length/mean is" in row.kept.reason and row.kept.trainer["replays"] is True
        assert row.trainer_logprobs is not None
        gaps = [
            abs(a - b) for a, b, sampled in zip(row.trainer_logprobs, row.logprobs, row.mask, strict=True) if sampled
        ]
        assert max(gaps) < 1e-4
    for row in refused.responses:
        assert row.trainer_logprobs is None and row.kept is not None and "RoutingError: " in row.kept.reason


def test_every_update_is_compared_by_probes_and_tensors_and_a_stale_one_is_told(
    experts: tuple[VerlRun, Path],
) -> None:
    run, work = experts
    steps = run.expect_failure(3)
    data = read_run(work / "checkpoints/mismatch")
    (told,) = [event for event in data.events if event.name == "weight_sync"]
    assert (told.step, told.level) == (3, "error")  # its tensors leave no doubt, and the run is to be warned
    # The embeddings and the norms: of each of the model's layers two, and the last.
    assert re.match(
        r"rollout server 0: weight update 4: stale\. (\d+) of \1 tensors differ from the trainer's, such as .*\. "
        r"\1 are the trainer's previous version",
        told.message,
    ), told.message
    gaps = [step["mismatch/weight_sync_gap"] for step in steps]
    assert max(gaps[:2]) < 1e-4 < gaps[2], gaps  # the least that is taken for wrong in float32


def test_answers_without_any_routing_end_the_run_and_what_was_saved_stays(
    experts: tuple[VerlRun, Path],
) -> None:
    run, work = experts
    run.expect_failure(3)
    assert re.search(r"RoutingError: all \d+ rollouts of step 4 came without routing", run.log)
    saved = work / "checkpoints/global_step_3"
    assert (saved / "mismatch.json").is_file() and list((saved / "actor").glob("model_world_size_1_rank_0.pt"))
    (end,) = read_run(work / "checkpoints/mismatch").ends
    assert end.status == "failed" and "came without routing" in end.message


def test_processes_report_what_is_recorded_of_their_kind(experts: tuple[VerlRun, Path]) -> None:
    found = shape(experts[0].reports)
    assert found["workers"] == shape(recorded("sglang")["workers"])
    assert found["rollouts"] == shape(recorded("dense")["rollouts"])
