"""verl's real FSDP1 and FSDP2 engines with the block, without Ray and vLLM: replay, loss scale, learning rate, checkpoints."""

from __future__ import annotations

import math
import random
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.peers.scenarios import Run, named
from tests.peers.verl.kills import kill_in_process

fusing = named("tests.peers.verl.in_process.scenarios_fused")
masking = named("tests.peers.verl.in_process.scenarios_masks")
replaying = named("tests.peers.verl.in_process.scenarios_replay")
training = named("tests.peers.verl.in_process.scenarios_training")
ulysses = named("tests.peers.verl.in_process.scenarios_ulysses")


Result = dict[str, Any]
# Halved every 2 updates after 2 of warm-up, at least 0.1 from the eighth on.
HALVING = [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1, 0.1]
# Tokens of the samples 0 to 3; prompts of 6, 5, 4 and 6 of them.
TOKENS = [14, 12, 10, 9]
FSDP1 = {"VERL_TEST_STRATEGY": "fsdp"}


def apart(one: Any, two: Any) -> float:
    """Return the largest difference between two nested lists of numbers of the same shape."""
    if isinstance(one, list):
        assert len(one) == len(two)
        return max((apart(a, b) for a, b in zip(one, two, strict=True)), default=0.0)
    return abs(one - two)


@pytest.fixture(scope="module", params=["fsdp2", "fsdp"])
def host(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the environment that chooses verl's engine; FSDP1, `strategy: fsdp`, is its default."""
    return {"VERL_TEST_STRATEGY": request.param}


@pytest.fixture(scope="module")
def laid_out(run: Run, moe: Path) -> Result:
    return run(replaying.layouts, model=moe).expect()


@pytest.fixture(scope="module")
def faulty(run: Run, moe: Path) -> Result:
    return run(replaying.faults, model=moe).expect()


@pytest.fixture(scope="module")
def scaled(run: Run, untied: Path, host: Result) -> Result:
    return run(training.scaler, model=untied, env=host).expect()


@pytest.mark.numeric
def test_without_a_block_or_with_one_that_measures_the_engine_is_verls_bit_for_bit(run: Run, moe: Path) -> None:
    two, one = (run(replaying.stock, model=moe, env=env).expect() for env in ({}, FSDP1))
    # So what is proven with one of them holds with the other.
    assert apart(one["logprobs"], two["logprobs"]) < 1e-5
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_the_rollout_gets_the_embeddings_and_no_copy_of_them_as_a_head(
    run: Run, dense: Path, untied: Path, strategy: str
) -> None:
    """vLLM refuses a bucket of weights that has a tied head and not the embeddings."""
    env = {"VERL_TEST_STRATEGY": strategy}
    assert run(training.sent, model=dense, env=env).expect() == ["lm_head.weight"]
    assert run(training.sent, model=untied, env=env).expect() == []


@pytest.mark.numeric
def test_replay_is_exact_and_changes_no_bit_where_the_model_chose_itself(run: Run, moe: Path, host: Result) -> None:
    run(replaying.replay, model=moe, env=host).expect()


def test_other_tokens_are_routed_by_the_model_and_never_trained_on(run: Run, moe: Path) -> None:
    run(replaying.other_tokens, model=moe, timeout=300).expect()


def test_a_scoring_pass_that_is_asked_to_calls_samples_bad_and_replays_the_others(run: Run, moe: Path) -> None:
    run(replaying.judged, model=moe, timeout=300).expect()


def test_an_engine_that_does_not_call_the_hooks_of_replay_is_refused(run: Run, moe: Path) -> None:
    run(replaying.unhooked, model=moe).expect()


def test_the_reference_is_replayed_where_it_was_asked_for(run: Run, moe: Path, host: Result) -> None:
    run(replaying.reference, model=moe, env=host).expect()


def test_an_adapters_base_is_the_reference(run: Run, moe: Path, host: Result) -> None:
    run(replaying.adapter, model=moe, env=host).expect()


@pytest.mark.numeric
@pytest.mark.parametrize("layout", ["dynamic", "packed_dynamic", "packed_filled"])
def test_routes_travel_with_their_sample_through_every_layout_of_micro_batches(laid_out: Result, layout: str) -> None:
    whole, other = laid_out["whole"], laid_out[layout]
    assert apart(whole["logprobs"], laid_out["native"]) > 0.1
    assert apart(other["logprobs"], whole["logprobs"]) < 1e-5
    assert whole["missing"] == other["missing"] == 0  # every token of every sample went where its route says
    # Two epochs of two shuffled mini-batches: four optimizer steps.
    assert len(other["grad_norm"]) == 4
    assert other["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert other["routing/compared_tokens"] == whole["routing/compared_tokens"] == 3 * (2 * sum(TOKENS) - 8)


def test_routes_recorded_in_reordered_micro_batches_come_back_in_the_order_of_the_batch(laid_out: Result) -> None:
    assert laid_out["r2_dynamic"] == laid_out["r2_whole"]
    assert all(math.isfinite(norm) and norm > 0 for norm in laid_out["r2_update"]["grad_norm"])
    # The weights stand still, so that in all of four shuffled updates the model chooses what it chose for the same sample.
    assert laid_out["r2_update"]["routing/compared_tokens"] == 2 * 2 * sum(TOKENS)
    assert laid_out["r2_update"]["routing/set_mismatch_frac"] == 0


def test_wrong_routes_of_one_sample_are_refused_by_name(faulty: Result) -> None:
    table = Path(__file__).with_name("refused_routes.toml")
    for fault, (which, reason) in tomllib.loads(table.read_text(encoding="utf-8"))["fsdp"].items():
        assert faulty[fault].startswith("RoutingError: "), fault
        assert which in faulty[fault] and reason in faulty[fault], fault


def test_tokens_without_a_loss_need_no_routes(faulty: Result) -> None:
    assert faulty["filler"] == faulty["tool_answer"] == "nothing was refused"


def test_routes_of_other_tokens_than_a_samples_are_refused(faulty: Result) -> None:
    words = "its token ids are others than those that its routes were recorded of"
    for fault, sample, said in (
        ("of_another_sample", 0, f"{words} (2 of 4 samples), from token 0 on"),
        ("of_no_tokens", 0, f"{words} (4 of 4 samples), from token 0 on"),
        ("encoded_again", 1, f"{words} (1 of 4 samples), from token 8 on"),
    ):
        name = "abcd"[sample]
        assert faulty[fault].startswith(f"RoutingError: request {sample} of rank 0's mini-batch (uid {name}): {said}")
    # Scores may be asked for of any tokens, and what comes after the last token that counts was never replayed.
    for fault in ("good", "encoded_again_scored", "encoded_again_without_loss"):
        assert faulty[fault] == "nothing was refused", faulty[fault]


def test_routes_of_other_weights_than_were_sent_last_are_refused(
    faulty: Result,
) -> None:
    assert faulty["of_present"] == "nothing was refused"
    nobody = "nobody says which weights its routes were recorded with"
    for fault, sample, words in (
        ("of_older", 1, "its routes are of weight versions 2 to 2, expected 3"),
        ("of_two", 2, "its routes are of weight versions 2 to 3, expected 3"),
        ("of_nobody", 0, nobody),
    ):
        name = "abcd"[sample]
        said = f"RoutingError: request {sample} of rank 0's mini-batch (uid {name}): {words}"
        assert faulty[fault].startswith(said), faulty[fault]


def test_replay_of_a_model_without_experts_is_refused_when_the_engine_is_built(run: Run, dense: Path) -> None:
    found = run(training.refusals, dense=dense).expect()
    assert found.startswith("ReplayError: qwen3: no module of the model has experts")


@pytest.mark.numeric
def test_float16_leaves_the_same_fraction_of_bfloat16s_error_with_either_strategy(run: Run, dense: Path) -> None:
    """The trainer's side of uniform FP16: three bits more of mantissa are an eighth of the error, with FSDP1 as with FSDP2."""
    left = {}
    for name in ("fsdp2", "fsdp"):
        found = run(training.halves, model=dense, env={"VERL_TEST_STRATEGY": name}).expect()
        exact, brain, half = (np.concatenate(found[dtype]) for dtype in ("float32", "bfloat16", "float16"))
        left[name] = float(np.abs(half - exact).mean() / np.abs(brain - exact).mean())
        assert 0 < left[name] < 1 / 4, left  # the near end of an eighth
    assert left["fsdp"] == pytest.approx(left["fsdp2"], rel=0.1)


def test_an_overflow_skips_the_step_and_holds_schedule_and_controller(scaled: Result) -> None:
    updates = scaled["updates"]
    assert [entry["changed"] for entry in updates] == [False, True, False, True, True, True]  # warm-up begins at rate 0
    assert [entry["skipped_steps"] for entry in updates] == [0, 0, 1, 0, 0, 0]
    assert [entry["epoch"] for entry in updates] == [1, 2, 2, 3, 4, 5]
    # Times 2 after two good steps in a row, by 2 after an overflow.
    assert [entry["loss_scale"] for entry in updates] == [1024, 2048, 1024, 1024, 2048, 2048]
    assert [entry["lr_multiplier"] for entry in updates] == [1, 0.5, 0.25, 0.25, 0.125, 0.1]
    assert not math.isfinite(updates[2]["grad_norm"])
    assert all(math.isfinite(updates[i]["grad_norm"]) and updates[i]["grad_norm"] > 0 for i in (0, 1, 3, 4, 5))


def test_endless_overflows_are_an_error(scaled: Result) -> None:
    *before, last = scaled["endless"]  # from 2^11 on, until the scale is below 1
    assert before == ["nothing was refused"] * 11
    assert last.startswith("PrecisionError: gradients overflowed in 12 steps in a row")


@pytest.mark.in_process
def test_killed_in_the_middle_of_writes_it_goes_on_from_the_last_whole_checkpoint(
    run: Run, moe: Path, tmp_path: Path
) -> None:
    kill_in_process(run, moe, tmp_path, random.Random(2), kills=4, steps=8)


@pytest.mark.in_process
def test_the_rate_is_verls_schedule_times_the_rule(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(training.schedules, model=dense, out=tmp_path).expect()

    def rate(step: int) -> float:
        if step < 2:
            return 1e-3 * step / 2
        half = 0.5 * (1 + math.cos(math.pi * (step - 2) / 10))
        return 1e-3 * (0.05 + 0.95 * half)

    expected = [rate(step) * factor for step, factor in enumerate(HALVING)]
    assert found["reported"] == pytest.approx(expected, rel=1e-12)
    # Two optimizer steps of each update, at the rate that verl's metric gives.
    assert found["applied"] == [value for value in found["reported"] for _ in range(2)]
    assert found["silent"].startswith("ConfigError: mismatch.lr.trigger='response_length'")


def test_a_checkpoint_without_our_state_warns_and_a_damaged_one_is_refused(
    run: Run, dense: Path, tmp_path: Path, host: Result
) -> None:
    found = run(training.damaged, model=dense, out=tmp_path, env=host).expect()
    assert found["half"].startswith("RecordError: ")
    assert "mismatch.json is damaged" in found["half"]
    assert any("holds no loss-scaler state; the loss scale starts at 1024" in text for text in found["missing"])
    assert found["multipliers"] == [1.0, 0.5]  # of the second update and the third, with a period of 2


@pytest.fixture(scope="module")
def routes(run: Run, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(replaying.write_routes, model=moe, path=tmp_path_factory.mktemp("r") / "routes.pt").expect()


@pytest.mark.in_process
def test_two_ranks_replay_as_one_does(run: Run, moe: Path, routes: str, host: Result) -> None:
    run(replaying.on_two_ranks, model=moe, routes=routes, env=host).expect()


@pytest.mark.in_process
def test_ranks_that_share_a_sequence_replay_as_one_does(run: Run, moe: Path, routes: str) -> None:
    run(ulysses.on_two_ranks, model=moe, routes=routes, env=FSDP1).expect()


@pytest.mark.in_process
def test_the_readiness_report_names_weights_whoever_holds_them(run: Run, dense: Path, host: Result) -> None:
    run(replaying.on_two, scenario="shards", model=dense, env=host).expect()


def test_what_fails_on_one_rank_fails_on_all_and_an_overflow_on_one_skips_all(
    run: Run, moe: Path, dense: Path, routes: str, host: Result
) -> None:
    run(replaying.on_two, scenario="rank_faults", moe=moe, dense=dense, routes=routes, env=host).expect()


@pytest.mark.in_process
def test_a_fused_head_has_every_section_that_the_models_own_head_has(run: Run, dense: Path, moe: Path) -> None:
    run(fusing.heads, dense=dense, moe=moe, env=FSDP1).expect()


def test_logits_are_widened_only_where_verl_has_no_kernel_of_its_own(run: Run) -> None:
    found = run(fusing.widened).expect()
    assert found == {"none": "float32", "flash": "bfloat16", "flash off": "float32", "npu": "bfloat16"}


def test_sampling_masks_lie_under_every_pass_of_the_engine(run: Run, moe: Path, host: Result) -> None:
    run(masking.masked, model=moe, env=host).expect()


def test_wrong_sampling_masks_are_refused_or_make_their_samples_bad(run: Run, moe: Path) -> None:
    run(masking.wrong, model=moe).expect()


@pytest.mark.in_process
def test_ranks_that_share_a_sequence_have_its_masks(run: Run, moe: Path) -> None:
    run(masking.on_two_ranks, model=moe, env=FSDP1).expect()


def test_masks_are_read_off_what_vllm_reports_of_its_most_likely_tokens(run: Run) -> None:
    found = run(masking.read_off).expect()
    assert found["True"] == [[2, 5, 1, 9], [2, 2]]
    assert "RecordError: rollout r, token 0: at least 3 tokens were left to sample from" in found["False"]
