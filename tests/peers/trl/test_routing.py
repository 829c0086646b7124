"""The `routing` section in the real TRL: R2 with transformers' generation, R3 with vLLM, and routes that must be refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.oracle import expect_float32
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_routing as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_routing")


pytestmark = pytest.mark.engine


# In these settings every update uses the weights that sampled, and in float32 the recorded experts are the model's own: replay
# must then change no bit. In the others the weights move between recording and replay.
UNMOVED = ("plain", "aligned", "accumulation", "reentrant", "saved", "truncated", "auxiliary", "reference")
MOVED = ("iterations", "steps")


def test_replay_of_the_models_own_routes_changes_no_bit(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.transformers, model=moe, out=tmp_path, timeout=600).expect()
    assert set(found) == {*UNMOVED, *MOVED}
    for name in UNMOVED:
        stock, r2 = (found[name][kind] for kind in ("stock", "R2"))
        assert stock["parameters"] == r2["parameters"] and stock["losses"] == r2["losses"], name
        assert r2["mismatch"] == r2["native_rows"] == [0.0] * 3, name
        assert r2["forwards"] >= 3 and stock["forwards"] == 0, name
    for name in MOVED:
        stock, r2 = (found[name][kind] for kind in ("stock", "R2"))
        # The second update of a batch keeps the routes that it was recorded with, where the model would choose others.
        assert r2["parameters"] != stock["parameters"], name
        assert r2["mismatch"][0] == r2["mismatch"][2] == 0.0, name
        assert min(r2["mismatch"][1], r2["mismatch"][3]) > 0.05, name
    reference = found["reference"]
    # Once the policy has moved, its routes are not the reference's own.
    assert reference["R2 reference"]["parameters"] != reference["R2"]["parameters"]
    assert reference["R2 reference"]["mismatch"] == [0.0] * 3


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_adapters_and_their_reference(run: Run, moe: Path, tmp_path: Path, mode: str) -> None:
    found = run(scenarios.lora, model=moe, out=tmp_path, mode=mode).expect()
    # With vLLM, TRL takes a pass for the old log-probabilities too.
    passes = {"reference False": 6, "reference True": 9} if mode == "R3" else {"reference False": 3}
    assert {name: result["forwards"] for name, result in found.items()} == passes
    assert all(result["mismatch"] == [0.0] * 3 for result in found.values())
    assert len({result["parameters"] for result in found.values()}) == len(found)


def test_evaluation_is_replayed_and_counted_apart(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.evaluation, model=moe, out=tmp_path).expect()
    # One evaluation before training and one after each of three steps.
    assert len(found["tokens"]) >= 3 and min(found["tokens"]) > 50 and set(found["mismatch"]) == {0.0}
    # A training step holds 8 completions of at most 16 tokens and their prompts, which no evaluation's tokens are added to.
    by_layer = [f"mismatch/routing/layer_{layer}_set_mismatch" for layer in (0, 1)]
    assert found["layers"] == {"train": by_layer, "eval/default": by_layer} and not found["logged"]
    assert len(found["train tokens"]) == 3 and max(found["train tokens"]) < 8 * (16 + 12)


def test_a_batch_that_fails_does_not_spoil_the_next(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.failed_batch, model=moe, out=tmp_path).expect()
    assert found["first"] == "KeyError" and found["steps"] == 2
    assert found["outside"] == 0.0  # a pass over tokens of one's own, between batches, is routed by the model


def test_agreement_sees_routes_that_do_not_follow_their_samples(run: Run, moe: Path, tmp_path: Path) -> None:
    # What test_replay_of_the_models_own_routes_changes_no_bit would miss if agreement did not look.
    assert run(scenarios.misplaced, model=moe, out=tmp_path, kind="routes").expect()["mismatch"][0] > 0.1


def test_a_loss_of_tokens_that_were_not_sampled_is_refused(run: Run, moe: Path, tmp_path: Path) -> None:
    ran = run(scenarios.misplaced, model=moe, out=tmp_path, kind="tokens")
    assert ran.code != 0 and "gives them tokens that neither of the last two steps has" in ran.stderr, ran.stderr[
        -2000:
    ]


def test_other_tokens_in_the_loss_are_routed_by_the_model(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.other_tokens, model=moe, out=tmp_path, timeout=600).expect()
    first, second = found["seen"]
    # The second update's routes are those of the weights before: its passes tell which of them are replayed.
    assert first["moved"] < 1e-5 and second["moved"] > 1e-3
    for seen in (first, second):
        assert seen["altered"] == seen["holes"] == 0.0, seen
        assert max(seen["order"], seen["some"], seen["wider"]) < 1e-5, seen
    assert found["others"] == [2.0, 2.0] and found["plain others"] == [0.0, 0.0]
    assert found["parameters"][0] == found["parameters"][1]  # what is scored beside the loss changes nothing


def test_a_pass_beside_the_loss_does_not_stand_for_the_losss_own(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.own_pass, model=moe, out=tmp_path).expect()
    assert found["Halves inside"] == found["Halves outside"] == "[0.0]"  # in another order, each under its routes
    assert found["Beside outside"] == "[1.0]"  # TRL's own loss is known there, and others may be trained on
    own = "the loss was computed without a replayed forward pass over the micro-batch's tokens"
    for name in ("Altered outside", "Unbound outside"):
        assert own in found[name], (name, found[name])
    # A class inside of ours has replayed every row of the micro-batch; what it trains on beside them is counted.
    for name in ("Altered inside", "Unbound inside", "Beside inside"):
        assert found[name] == "[1.0]", (name, found[name])


# vLLM records.


@pytest.mark.numeric
def test_float32_engine_and_trainer_route_identically(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.engine, model=moe, out=tmp_path, dtype="float32").expect()
    assert found["mismatch"] == [0.0] * 3 and found["weight_version"] == 3
    expect_float32(found["history"], found["float32_errors"])
    assert found["tokens"] == found["native/tokens"] and min(found["tokens"]) > 50
    # Eight completions of two prompts: the prompts' routes are stored twice, not eight times.
    assert found["shared"] == [2] and found["versions"] == [[0, 3]]


@pytest.mark.numeric
def test_replay_closes_the_bf16_gap_on_the_same_tokens(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.engine, model=moe, out=tmp_path, dtype="bfloat16").expect()
    assert min(found["mismatch"]) > 0
    for name in ("k3_kl", "logp_abs_diff_mean"):
        print(name, found[name], found[f"native/{name}"])
    # Over all steps: single tokens on which experts differ carry k3, and a step has about a hundred.
    assert sum(found["k3_kl"]) < 0.7 * sum(found["native/k3_kl"])
    assert sum(found["logp_abs_diff_mean"]) < sum(found["native/logp_abs_diff_mean"])


def test_iterations_accumulation_and_checkpointing_with_vllm(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.engine, model=moe, out=tmp_path, dtype="float32", num_iterations=2, gradient_accumulation_steps=2,
        per_device_train_batch_size=4, gradient_checkpointing=True, max_steps=4,
    ).expect()  # fmt: skip
    assert found["mismatch"][0] == found["mismatch"][2] == 0.0 < min(found["mismatch"][1], found["mismatch"][3])
    expect_float32(found["history"], found["float32_errors"])


def test_measuring_changes_nothing(run: Run, moe: Path, tmp_path: Path) -> None:
    one, other = (
        run(scenarios.measured, model=moe, out=tmp_path / str(share), share=share).expect() for share in (0.0, 1.0)
    )
    assert one["parameters"] == other["parameters"] and one["losses"] == other["losses"]


# What must be refused, before the optimizer moves.

FAULTS = {
    "missing row": r"routing has \d+ rows for \d+ tokens, 1 missing",
    "extra row": r"routing has \d+ rows for \d+ tokens, 1 surplus",
    "swapped layers": r"layer \d of the routing trace .* layers are swapped",
    "shifted rows": "rows are shifted by one",
    "all zeros": "layer 0: all expert ids are zero",
    "duplicate ids": r"row 2, layer 1: duplicate expert ids",
    "id out of range": r"row 3, layer 0: expert id 16 is out of range; allowed: 0 to 15",
    "expert count": "routing has 3 experts per token; allowed: 4",
    "missing layer": r"routing has 1 layers, but the model has MoE layers \(0, 1\)",
    "no routing": r"vLLM returned no routing",
    "policy version": "rollouts of weight version 7, but the engine is at 8",
}


def test_faulty_routes_are_named_row_by_row_or_refused_in_under_a_second(run: Run, moe: Path, tmp_path: Path) -> None:
    found = run(scenarios.faults, model=moe, out=tmp_path).expect()
    assert set(found) == {*FAULTS, "none"}
    messages: list[str] = []
    for name, message in FAULTS.items():
        one = found[name]
        assert not one["moved"], name
        if one["error"]:
            # All rows have it. No gradient reached a parameter, so that there was nothing for the optimizer to move by.
            assert (
                one["error"] in ("RoutingError", "RecordError") and not one["gradients"] and 0 < one["seconds"] < 1
            ), (name, one)
            messages.append(one["message"])
        else:
            # One row has it, and the others are trained on.
            assert one["gradients"] and len(one["bad"]) == 1, (name, one)
            messages += one["bad"]
        assert re.search(message, messages[-1]), (name, one)
    assert len({message.split(";")[0] for message in messages}) == len(FAULTS)
    assert found["none"]["bad"] == []
    assert found["none"]["error"] == "" and found["none"]["gradients"]  # the same batch, as the engine gave it
