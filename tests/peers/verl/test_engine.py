"""verl's real FSDP1 and FSDP2 engines with the block, without Ray and vLLM: replay, loss scale, learning rate, checkpoints."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.peers.scenarios import Run, named
from tests.peers.verl.kills import kill_in_process

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_fused as fusing
    from tests.peers.verl.in_process import scenarios_masks as masking
    from tests.peers.verl.in_process import scenarios_replay as replaying
    from tests.peers.verl.in_process import scenarios_training as training
    from tests.peers.verl.in_process import scenarios_ulysses as ulysses
else:
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


def apart(one: Any, two: Any) -> float:
    """Return the largest difference between two nested lists of numbers of the same shape."""
    if isinstance(one, list):
        assert len(one) == len(two)
        return max((apart(a, b) for a, b in zip(one, two, strict=True)), default=0.0)
    return abs(one - two)


def mean_apart(one: list[list[float]], two: list[list[float]]) -> float:
    """Return the mean difference between two lists of rows of the same lengths."""
    pairs = [pair for rows in zip(one, two, strict=True) for pair in zip(*rows, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


@pytest.fixture(scope="module", params=["fsdp2", "fsdp"])
def host(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the environment that chooses verl's engine; FSDP1, `strategy: fsdp`, is its default."""
    return {"VERL_TEST_STRATEGY": request.param}


@pytest.fixture(scope="module")
def replayed(run: Run, moe: Path, host: dict[str, str]) -> Result:
    return run(replaying.replay, model=moe, env=host).expect()


@pytest.fixture(scope="module")
def laid_out(run: Run, moe: Path) -> Result:
    return run(replaying.layouts, model=moe).expect()


@pytest.fixture(scope="module")
def faulty(run: Run, moe: Path) -> Result:
    return run(replaying.faults, model=moe).expect()


@pytest.fixture(scope="module")
def scaled(run: Run, untied: Path, host: dict[str, str]) -> Result:
    return run(training.scaler, model=untied, env=host).expect()


@pytest.fixture(scope="module")
def scheduled(run: Run, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(training.schedules, model=dense, out=tmp_path_factory.mktemp("schedules")).expect()


@pytest.mark.numeric
def test_without_a_block_or_with_one_that_measures_the_engine_is_verls_bit_for_bit(run: Run, moe: Path) -> None:
    stock = {}
    for name in ("fsdp2", "fsdp"):
        found = run(replaying.stock, model=moe, env={"VERL_TEST_STRATEGY": name}).expect()
        verl = stock[name] = dict(found.pop("verl"))
        assert verl.pop("class") == "FSDPEngineWithLMHead"
        assert verl["grad_norm"][0] > 0
        for ours in found.values():
            assert ours == {"class": "MismatchFSDPEngine", **verl}
    # So what is proven with one of them holds with the other.
    assert apart(stock["fsdp"]["logprobs"], stock["fsdp2"]["logprobs"]) < 1e-5
    assert stock["fsdp"]["grad_norm"] == pytest.approx(stock["fsdp2"]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_the_rollout_gets_the_embeddings_and_no_copy_of_them_as_a_head(
    run: Run, dense: Path, untied: Path, strategy: str
) -> None:
    """vLLM refuses a bucket of weights that has a tied head and not the embeddings."""
    env = {"VERL_TEST_STRATEGY": strategy}
    assert run(training.sent, model=dense, env=env).expect() == ["lm_head.weight"]
    assert run(training.sent, model=untied, env=env).expect() == []


def test_versions_that_nobody_has_run_train_with_one_warning_and_the_same_numbers(run: Run, moe: Path) -> None:
    newer = {"torch": "2.99.0+cpu", "transformers": "5.99.0"}
    known, unknown = (run(replaying.of_versions, model=moe, newer=versions).expect() for versions in ({}, newer))
    assert known.pop("told") == [] and "2.99.0+cpu" not in known.pop("versions").values()
    (told,) = unknown.pop("told")
    assert told.startswith("untested with torch 2.99.0+cpu and transformers 5.99.0; the ")
    assert told.endswith(" checked at run time.")
    assert unknown.pop("versions") == {**newer, "verl": "0.9.1"}
    assert unknown == known and known["grad_norm"][0] > 0


@pytest.mark.parametrize("how", ["r2", "own", "own_checkpointed"])
def test_replaying_what_the_model_chose_itself_changes_no_bit(replayed: Result, how: str) -> None:
    assert replayed[how] == replayed["native"]
    assert replayed[f"{how}_parameters"] == replayed["native_parameters"]
    assert replayed[f"{how}_metrics"]["routing/set_mismatch_frac"] == 0


def test_experts_get_the_tokens_that_the_routes_say_and_the_last_token_goes_its_own_way(replayed: Result) -> None:
    for how in ("own", "other", "other_checkpointed"):
        assert replayed[f"{how}_seen"] == replayed[f"{how}_asked"]
    assert replayed["other_seen"] != replayed["own_seen"]
    # verl's rows of zeros for the last sampled token are no routes: the first layer chooses for it as without replay.
    assert replayed["other_last"] == replayed["own_last"]
    assert all(len(set(ids)) == 4 for ids in replayed["other_last"])
    assert replayed["other_metrics"]["routing/native_rows_frac"] == pytest.approx(4 / sum(TOKENS))


def test_other_routes_give_another_policy_which_checkpointing_does_not_change(replayed: Result) -> None:
    assert apart(replayed["other"], replayed["native"]) > 0.1
    assert replayed["other_checkpointed"] == replayed["other"]
    assert replayed["other_checkpointed_parameters"] == replayed["other_parameters"] != replayed["own_parameters"]


def test_a_pass_that_asks_for_the_models_own_routing_gets_it(replayed: Result) -> None:
    assert replayed["asked_native"] is True


def test_an_update_without_routes_is_refused_in_r2_too(replayed: Result) -> None:
    assert replayed["r2_lost"].startswith("RoutingError: the batch of 4 samples has no 'routed_experts'")


def test_ids_of_an_update_are_checked_unless_this_rank_has_judged_its_routes(replayed: Result) -> None:
    assert replayed["r2_range"].startswith("RoutingError: request 1 of rank 0's mini-batch, row 2, layer 1")
    assert "expert id 16" in replayed["r2_range"]


def test_the_report_says_what_is_replayed(replayed: Result) -> None:
    report = replayed["report"]
    assert report["moe"] == {"family": "qwen3_moe", "layers": [0, 1], "num_experts": 16, "top_k": 4}
    assert report["routing"] == "R3"


@pytest.mark.numeric
@pytest.mark.parametrize("layout", ["one_by_one", "dynamic", "packed", "packed_dynamic", "packed_filled"])
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


@pytest.mark.parametrize(
    ("fault", "named", "reason"),
    [
        ("zero", "request 2 of rank 0's mini-batch (uid c)", "0 rows for 10 tokens"),
        ("empty", "request 1 of rank 0's mini-batch (uid b)", "0 rows for 12 tokens"),
        ("short", "request 0 of rank 0's mini-batch (uid a)", "11 rows for 14 tokens"),
        ("zeros_from", "request 0 of rank 0's mini-batch (uid a)", "routing has 9 rows for 14 tokens"),
        ("surplus", "request 3 of rank 0's mini-batch (uid d)", "10 rows for 9 tokens"),
        ("hole", "request 1 of rank 0's mini-batch (uid b), row 3, layer 0", "duplicate expert ids"),
        ("range", "request 1 of rank 0's mini-batch (uid b), row 2, layer 1", "expert id 16"),
        ("layer", "request 3 of rank 0's mini-batch (uid d), layer 1", "all expert ids are zero"),
        ("tool_answer_short", "request 0 of rank 0's mini-batch (uid a)", "depends on the first 9"),
        ("gone", "the batch of 4 samples", "no 'routed_experts'"),
        # Of samples that this rank has judged in the pass before, the device that replays them checks the ids.
        ("range_judged", "layer 1 of the routing trace is [16", "allowed: distinct ids from 0 to 15"),
        ("first_judged", "request 1 of rank 0's mini-batch (uid b), row 0, layer 1", "expert id 16"),
        ("short_judged", "request 0 of rank 0's mini-batch (uid a)", "11 rows for 14 tokens"),
        ("swapped", "layer", "chance is 25%"),
    ],
)
def test_wrong_routes_of_one_sample_are_refused_by_name(faulty: Result, fault: str, named: str, reason: str) -> None:
    assert faulty[fault].startswith("RoutingError: ")
    assert named in faulty[fault]
    assert reason in faulty[fault]


def test_a_scoring_pass_that_is_asked_to_calls_samples_bad_and_replays_the_others(run: Run, moe: Path) -> None:
    found = run(replaying.judged, model=moe, timeout=300).expect()
    assert found.pop("all").startswith("RoutingError: request 0 of rank 0's mini-batch")
    for name, own in found.items():
        assert own["faults"] == [[0], [3], [3], [0]], name
        assert max(own["apart"][0], own["apart"][3]) < 1e-5 < own["apart"][1], name
        assert not own["plain"] and own["native"] == "nothing was refused", (name, own["native"])
        # Without the marks of the driver, an update of the same samples is refused.
        assert own["unmarked"].startswith("RoutingError: request 1 of rank 0's mini-batch"), name
        assert own["marked"] == "nothing was refused", (name, own["marked"])


def test_a_scoring_pass_that_is_asked_to_calls_samples_with_other_masks_bad(run: Run, moe: Path) -> None:
    found = run(masking.judged, model=moe, timeout=300).expect()
    assert found["faults"] == [[6], [6], [0], [0]] and not found["clean"]
    assert found["marked"] and found["unmarked"].startswith("RecordError: mismatch.sampling_mask: rollout 0")


def test_ranks_share_one_number_for_the_masks_of_a_pass(run: Run) -> None:
    found = run(masking.collectives).expect()
    for name, bad in (("clean", False), ("bad", True)):
        assert found[name] == {"used": ["all_reduce"], "reports": bad}


def test_refused_routes_change_no_weight(faulty: Result) -> None:
    assert faulty["untouched"] is True


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


def test_rows_that_fill_up_a_batch_are_no_routes_and_are_not_counted(run: Run, moe: Path) -> None:
    found = run(replaying.filled_up, model=moe).expect()
    for case, own in found.items():
        # The last sampled token never passed through the rollout engine.
        native = 0 if "R2" in case else 2
        assert own["missing"] == 0, case
        assert (own["routing/compared_tokens"], own["routing/native_rows_frac"]) == (26 - native, native / 26), case


def test_routes_of_other_weights_than_were_sent_last_are_refused(
    faulty: Result,
) -> None:
    assert faulty["of_present"] == "nothing was refused"
    nobody = "nobody says which weights its routes were recorded with"
    for fault, sample, words in (
        ("of_older", 1, "its routes are of weight versions 2 to 2, expected 3"),
        ("of_two", 2, "its routes are of weight versions 2 to 3, expected 3"),
        ("of_nobody", 0, nobody),
        ("of_one_unknown", 3, nobody),
    ):
        name = "abcd"[sample]
        said = f"RoutingError: request {sample} of rank 0's mini-batch (uid {name}): {words}"
        assert faulty[fault].startswith(said), faulty[fault]


def test_other_tokens_are_routed_by_the_model_and_never_trained_on(run: Run, moe: Path) -> None:
    found = run(replaying.other_tokens, model=moe, timeout=300).expect()
    native, altered = found.pop("native"), found.pop("native_altered")
    for name, own in found.items():
        replays = native if "R2" in name else own["again"]  # R3's routes are not the model's own
        for got, wanted in ((own["altered"], altered), (own["scored"], replays), (own["again"], replays)):
            assert sum(got, []) == pytest.approx(sum(wanted, []), abs=2e-6), name
        assert own["scored"] != altered and (
            "R2" in name or sum(own["scored"], []) != pytest.approx(sum(native, []), abs=1e-3)
        )
        assert (
            "its token ids are others than those that its routes were recorded of (1 of 4 samples)" in own["refused"]
        ), name
        assert own["others"] == own["extra_others"] == 1.0 and own["extra"] < 1e-6, (name, own["others"], own["extra"])


def test_an_engine_that_does_not_call_the_hooks_of_replay_is_refused(run: Run, moe: Path) -> None:
    found = run(replaying.unhooked, model=moe).expect()
    for mode, own in found.items():
        for what in ("scored", "updated"):
            said = "ReplayError: mismatch.routing: verl's engine ran 4 of 4 samples without its forward_step"
            assert own[what].startswith(said), (mode, what, own[what])
        assert own["kept"] is True and own["after"] == "nothing was refused", mode


def test_the_reference_is_replayed_where_it_was_asked_for(run: Run, moe: Path, host: dict[str, str]) -> None:
    found = run(replaying.reference, model=moe, env=host).expect()
    assert found["off"] == found["native"]
    assert apart(found["on"], found["native"]) > 0.1
    assert found["on"] == found["actor"]
    # What the reference would choose says nothing about the gap between rollout and trainer.
    assert "routing/compared_tokens" not in found["on_metrics"]


def test_an_adapters_base_is_the_reference(run: Run, moe: Path, host: dict[str, str]) -> None:
    found = run(replaying.adapter, model=moe, env=host).expect()
    native, replayed = found["R3_base_False"], found["R3_base_True"]
    assert apart(native, replayed) > 0.1
    assert found["R2_base_False"] == native
    assert apart(found["R2_base_True"], replayed) < 1e-5
    # An adapter that has not been trained changes nothing: its own pass is replayed in R3, and recorded in R2.
    assert found["R3_False"] == found["R3_True"] == replayed
    assert found["R2_False"] == found["R2_True"] == native
    if "fsdp" in host.values():
        # Not in every version of PEFT; where it finds them, nothing need be refused.
        assert "peft" in found["sent"] and "would send the rollout an empty one" in found["sent"]
    else:
        assert found["sent"] == "nothing was refused"
    assert apart(found["trained"], replayed) > 0
    assert not any(found[f"{mode}_recorded_base_{wanted}"] for mode in ("R2", "R3") for wanted in (False, True))


def test_what_the_engine_cannot_do_is_refused_when_it_is_built(run: Run, dense: Path, moe: Path) -> None:
    found = run(training.refusals, dense=dense, moe=moe).expect()
    assert found["dense"].startswith("ReplayError: qwen3: no module of the model has experts")
    assert "verl's actor engine computes in bfloat16" in found["dtype"]
    assert "verl's ref engine computes in bfloat16" in found["reference_dtype"]
    assert found["disabled"].startswith("PrecisionError: verl's ShardedGradScaler has disabled itself on device 'cpu'")


def test_the_loss_scaler_has_the_settings_of_the_block_and_is_on(scaled: Result) -> None:
    assert scaled["scaler"] == {"kind": "LossScaler", "enabled": True}
    assert scaled["settings"] == {"init_scale": 1024.0, "growth_interval": 2}
    assert (scaled["autocast"], scaled["parameter_dtypes"]) == ("torch.float16", ["torch.float32"])


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
def test_killed_and_resumed_the_next_update_is_the_same(
    run: Run, dense: Path, tmp_path: Path, host: dict[str, str]
) -> None:
    train = partial(run, training.resumable, model=dense, env=host)
    straight = train(out=tmp_path / "a", resume=False).expect()["updates"]
    killed = train(out=tmp_path / "b", resume=False, kill_after=6)
    assert killed.code == -9
    again = train(out=tmp_path / "b", resume=True).expect()["updates"]
    before = [json.loads((tmp_path / "b" / f"log_{step}.json").read_text()) for step in range(1, 7)]
    assert [entry["step"] for entry in again] == [6, 7, 8, 9]
    assert before + again == straight
    # The scale had moved, and the surge of update 4 was found: both would differ if they began anew.
    assert straight[5]["loss_scale"] == 2.0**14
    assert straight[9]["lr_multiplier"] < 1


@pytest.mark.in_process
def test_killed_in_the_middle_of_writes_it_goes_on_from_the_last_whole_checkpoint(
    run: Run, moe: Path, tmp_path: Path
) -> None:
    found = kill_in_process(run, moe, tmp_path, random.Random(2), kills=4, steps=8, told=lambda: None)
    assert sum(found.values()) == 4, found


@pytest.mark.in_process
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_rate_is_verls_schedule_times_the_rule(scheduled: Result, schedule: str) -> None:
    found = scheduled[schedule]

    def rate(step: int) -> float:
        if step < 2:
            return 1e-3 * step / 2
        half = 0.5 * (1 + math.cos(math.pi * (step - 2) / 10))
        return 1e-3 * (1.0 if schedule == "constant" else 0.05 + 0.95 * half)

    expected = [rate(step) * factor for step, factor in enumerate(HALVING)]
    assert found["reported"] == pytest.approx(expected, rel=1e-12)
    # Two optimizer steps of each update, at the rate that verl's metric gives.
    assert found["applied"] == [value for value in found["reported"] for _ in range(2)]
    assert found["metrics"]["lr_multiplier"] == 0.1
    assert scheduled["silent"].startswith("ConfigError: mismatch.lr.trigger='response_length'")
    # Stock verl reports the rate of the next update.
    assert found["stock"][:12] == pytest.approx([rate(step) for step in range(12)], rel=1e-12)


def test_a_checkpoint_without_our_state_warns_and_a_damaged_one_is_refused(
    run: Run, dense: Path, tmp_path: Path, host: dict[str, str]
) -> None:
    found = run(training.damaged, model=dense, out=tmp_path, env=host).expect()
    assert "mismatch.json" in found["files"]
    assert found["half"].startswith("RecordError: ")
    assert "mismatch.json is damaged" in found["half"]
    assert "holds {'schema': 9" in found["schema"] and "mismatch-ext reads a JSON object of schema 2" in found["schema"]
    assert "the state of mismatch.lr is of trigger" in found["trigger"]
    assert any("holds no loss-scaler state; the loss scale starts at 1024" in text for text in found["missing"])
    assert found["multipliers"] == [1.0, 0.5]  # of the second update and the third, with a period of 2


@pytest.fixture(scope="module")
def routes(run: Run, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(replaying.write_routes, model=moe, path=tmp_path_factory.mktemp("r") / "routes.pt").expect()


@pytest.fixture(scope="module")
def on_one_rank(run: Run, moe: Path, routes: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return on_ranks(run, 1, moe, routes, tmp_path_factory.mktemp("one"), {})


def on_ranks(run: Run, world: int, moe: Path, routes: str, out: Path, env: dict[str, str]) -> Result:
    path = out / "gradients.pt"
    found = run(replaying.sharded_on, world=world, model=moe, routes=routes, path=path, env=env).expect()
    return {**found, "gradients": torch.load(path)}


def test_routes_stay_with_their_tokens_when_verl_balances_a_batch_over_ranks(run: Run, moe: Path) -> None:
    found = run(replaying.balanced, model=moe).expect()
    # verl has moved samples between the ranks, and has added one of 128 tokens, which has no routes.
    own = [int(key) for key in found["keys"] if key.isdigit()]
    assert sorted(own) == list(range(7)) != own and sum(found["filled_up"]) == 1
    # Scored and trained on, every token went to the experts that were recorded of it; TOKENS repeat after four samples.
    lengths = [TOKENS[number % 4] for number in range(7)]
    assert found["wrong"] == 0 and found["compared"] == 2 * (sum(lengths) - 7)
    assert [one["routing/other_passes"] for one in found["updated"]] == [0, 0]


@pytest.mark.in_process
def test_two_ranks_replay_as_one_does(
    run: Run, moe: Path, routes: str, tmp_path: Path, on_one_rank: Result, host: dict[str, str]
) -> None:
    one, two = on_one_rank, on_ranks(run, 2, moe, routes, tmp_path, host)
    for mode in ("R3", "R2"):
        assert two[mode] == one[mode]
        assert two[f"{mode}_routes"] == one[f"{mode}_routes"]
        for name in ("routing/compared_tokens", "routing/set_mismatch_frac"):
            assert two[f"{mode}_metrics"][name] == one[f"{mode}_metrics"][name]
    assert apart(one["R3"], one["R2"]) > 0.1
    assert one["gradients"].keys() == two["gradients"].keys()
    for name, gradient in one["gradients"].items():
        assert torch.isfinite(gradient).all()
        torch.testing.assert_close(two["gradients"][name], gradient, rtol=0, atol=1e-6)


@pytest.mark.in_process
@pytest.mark.parametrize("world", [1, 2])
def test_the_readiness_report_names_weights_whoever_holds_them(
    run: Run, dense: Path, world: int, host: dict[str, str]
) -> None:
    found = run(replaying.shards_on, world=world, model=dense, env=host).expect()
    assert len(found) == (2 if "fsdp" in host.values() else 1)
    for orig, one in found.items():
        assert one["whole"], one["names"]
        # What the ranks' parts add up to is the whole, but where FSDP1 does not say which parts they are.
        assert one["unequal"] == []
        assert one["compared"] == ([] if orig == "True" and world > 1 else one["names"])
        assert len(one["reasons"]) == world
        for name, *reasons in one["reasons"]:
            assert name in one["names"] and [f" {name} (max 1e+06)" in reason for reason in reasons] == [True]


def test_what_fails_on_one_rank_fails_on_all_and_an_overflow_on_one_skips_all(
    run: Run, moe: Path, dense: Path, routes: str, host: dict[str, str]
) -> None:
    found = run(replaying.rank_faults_on_two, moe=moe, dense=dense, routes=routes, env=host).expect()
    assert found["lost"][0].startswith("RoutingError: rank 1: request 1 of rank 1's mini-batch: routing has 0 rows")
    assert found["lost"][1].startswith("RoutingError: request 1 of rank 1's mini-batch: routing has 0 rows")
    assert found["kept"] is True
    assert found["scales"] == [[1024.0, 512.0]] * 2
    assert found["epochs"] == [1, 1]
    assert [metrics["skipped_steps"] for metrics in found["metrics"]] == [1, 1]


@pytest.mark.in_process
def test_a_fused_head_has_every_section_that_the_models_own_head_has(run: Run, dense: Path, moe: Path) -> None:
    found = run(fusing.heads, dense=dense, moe=moe, env={"VERL_TEST_STRATEGY": "fsdp"}).expect()
    for name, own in found["own"].items():
        fused = found["fused"][name]
        # In float16 the two heads have the same products, and sum gradients in other orders: Adam's first step has the size of
        # its rate whatever a gradient's, so that one about zero which rounds otherwise moves its weight the other way. What
        # the update did is then held to a hundredth of what it moved.
        close = 1e-5 if name != "float16" else 2e-3
        moved = mean_apart(own["after"], own["logprobs"])
        assert moved > 0.1, name
        for what in ("logprobs", "entropy", "probes"):
            assert apart(fused[what], own[what]) < (close if what != "entropy" or name != "float16" else 5e-3), (
                name,
                what,
            )
        if name == "float16":
            assert mean_apart(fused["after"], own["after"]) < 0.01 * moved
        else:
            assert apart(fused["after"], own["after"]) < close, name
        assert fused["vocabulary"] is None and own["vocabulary"]["mass_mean"] > 0.01
        terms = [key for key in own if key.startswith("kl ")]
        assert len(terms) == (1 if name == "routes" else 4)
        for key in terms:
            assert fused[key] == pytest.approx(own[key], rel=max(close, 1e-4), abs=close), (name, key)
            assert own[key][2] > 0.01
        assert fused["metrics"].keys() == own["metrics"].keys()
        for key in ("routing/set_mismatch_frac", "routing/compared_tokens", "lr_multiplier", "loss_scale"):
            assert fused["metrics"].get(key) == own["metrics"].get(key), (name, key)
    # Probes are scored as if at temperature 1, whatever the rollouts' is.
    assert found["own"]["padded"]["probes"] == found["own"]["packed"]["probes"]
    assert found["own"]["routes"]["metrics"]["routing/set_mismatch_frac"] > 0.1


@pytest.mark.in_process
def test_ranks_that_share_a_sequence_replay_as_one_does(
    run: Run, moe: Path, routes: str, tmp_path: Path, on_one_rank: Result
) -> None:
    # verl's Ulysses, against one rank with verl's own attention on a padded batch.
    two = run(
        ulysses.shared_on,
        world=2,
        model=moe,
        routes=routes,
        path=tmp_path / "gradients.pt",
        env={"VERL_TEST_STRATEGY": "fsdp"},
    ).expect()
    gradients = torch.load(tmp_path / "gradients.pt")
    for mode in ("R3", "R2"):
        assert apart(two[mode], on_one_rank[mode]) < 1e-5
        assert two[f"{mode}_routes"] == on_one_rank[f"{mode}_routes"]
        for name in ("routing/compared_tokens", "routing/set_mismatch_frac", "routing/other_passes"):
            assert two[f"{mode}_metrics"][name] == on_one_rank[f"{mode}_metrics"][name], name
    assert gradients.keys() == on_one_rank["gradients"].keys()
    for name, gradient in on_one_rank["gradients"].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=2e-6)
    assert all("row 3, layer 0: duplicate expert ids" in said or "duplicate" in said for said in two["lost"]), two[
        "lost"
    ]
    assert two["objects"] == 0  # ranks agree by numbers
    assert two["faults"] and all(
        [bool(number) for number in one] == [row == 1 for row in range(8)] for one in two["faults"]
    ), two["faults"]


def test_what_a_fused_head_cannot_do_is_refused(run: Run, untied: Path) -> None:
    found = run(fusing.refusals, dense=untied).expect()
    # verl 0.9.1 shards an output layer that is not the embeddings' by itself, and its fused head then fails by itself.
    assert "mixed torch.Tensor and DTensor" in found["untied"]
    assert "log-probabilities in float16; allowed: float32" in found["rounded"]


def test_sampling_masks_lie_under_every_pass_of_the_engine(run: Run, moe: Path, host: dict[str, str]) -> None:
    found = run(masking.masked, model=moe, env=host).expect()
    # verl's own engine, with a mask of the whole vocabulary over its logits.
    assert apart(found["scored"], found["dense"]) < 1e-5
    assert apart(found["small"], found["dense"]) < 1e-5
    assert mean_apart(found["scored"], found["native"]) > 0.5
    stock, before = found["moved"]
    moved = mean_apart(stock, before)
    assert moved > 1e-3 and mean_apart(found["updated"], stock) < 0.01 * moved
    assert found["report"] and found["metrics"]["sampling_mask_size"] == 5
    wrong = found["wrong"]
    assert (
        "ReplayError: mismatch.sampling_mask, but the batch of 4 samples has no 'sampling_mask_ids'" in wrong["missing"]
    )
    assert "RecordError: mismatch.sampling_mask: rollout 0 of rank 0's mini-batch" in wrong["moved"]
    assert "not among the 5 tokens of its sampling mask" in wrong["altered"]
    assert wrong["filled up"] == "nothing was refused"
    assert "ReplayError: mismatch.sampling_mask: verl's engine gives the first token" in wrong["other logits"]
    assert "scored 4 of 4 samples without its prepare_model_outputs" in wrong["overridden"]


@pytest.mark.in_process
def test_ranks_that_share_a_sequence_have_its_masks(run: Run, moe: Path) -> None:
    alone = run(masking.masked, model=moe, env={"VERL_TEST_STRATEGY": "fsdp"}).expect()["scored"]
    two = run(masking.shared_on, world=2, model=moe, env={"VERL_TEST_STRATEGY": "fsdp"}).expect()
    assert apart(two, alone) < 1e-5


def test_masks_are_read_off_what_vllm_reports_of_its_most_likely_tokens(run: Run) -> None:
    found = run(masking.read_off).expect()
    assert found["kept True"] == found["objects True"] == [[2, 5, 1, 9], [2, 2]]
    for name in ("kept", "objects"):
        assert "RecordError: rollout r, token 0: at least 3 tokens were left to sample from" in found[f"{name} False"]
    assert found["aborted True"] == [[], []]


def test_logits_are_widened_only_where_verl_has_no_kernel_of_its_own(run: Run) -> None:
    assert run(fusing.widened).expect() == {
        "none": "own float32",
        "flash": "kernel bfloat16",
        "flash off": "own float32",
        "npu": "kernel bfloat16",
        "npu, flash off": "kernel bfloat16",
    }
