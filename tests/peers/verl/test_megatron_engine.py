"""verl's whole Megatron engine in our worker, on a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named
from tests.peers.verl.recorded import recorded, shape

if TYPE_CHECKING:
    from tests.peers.verl import scenarios_megatron_engine as scenarios
else:
    scenarios = named("tests.peers.verl.scenarios_megatron_engine")


pytestmark = [pytest.mark.nightly, pytest.mark.engine]


@pytest.fixture(scope="module")
def ran(run: Run, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one = (
        scenarios.stock,
        scenarios.float32,
        scenarios.replay,
        scenarios.layouts,
        scenarios.reference,
        scenarios.weights,
        scenarios.surge,
    )
    given: dict[str, Any] = {scenario.__name__: {"model": moe} for scenario in one}
    for scenario in (scenarios.checkpoint, scenarios.rates):
        name = scenario.__name__
        given[name] = {"model": moe, "out": tmp_path_factory.mktemp(name)}
    # Megatron is imported with stubs that this scenario removes, and there is no other to share its imports with.
    return run(scenarios.several, timeout=400, fresh=True, scenarios=given).expect()


def gap(one: list[list[float]], two: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


def test_no_stub_was_called_or_left(ran: dict[str, Any]) -> None:
    assert ran["stubs_called"] == ran["stubs_left"] == []


def test_a_block_that_measures_changes_nothing(ran: dict[str, Any]) -> None:
    stock = ran["stock"]
    assert stock["verl"].pop("class") == "MegatronEngineWithLMHead"
    assert stock["monitor"].pop("class") == "MismatchMegatronEngine"
    assert stock["monitor"] == stock["verl"]
    assert stock["verl"]["grad_norm"] > 0.1
    assert stock["report"]["routing"] is stock["report"]["lr"] is None and stock["report"]["patches"] == []


def test_the_engine_computes_the_checkpoints_model(ran: dict[str, Any]) -> None:
    # bfloat16 in both, in different orders of operation.
    assert gap(ran["stock"]["verl"]["logprobs"], ran["stock"]["transformers"]) < 0.2


def test_in_float32_the_engine_takes_the_recorded_routes_by_itself(ran: dict[str, Any]) -> None:
    found = ran["float32"]
    assert list(found["report"]["trainer"]["parameter_dtypes"]) == ["float32"] and found["report"]["routing"] is None
    assert [(batch["pairs"], batch["differing"]) for batch in found["own"]] == [(2 * (14 + 12 + 10 + 9), 0)] * 10
    assert all(gap(batch["logprobs"], batch["expected"]) < 1e-5 for batch in found["own"])


@pytest.mark.parametrize("case", ["recorded", "other"])
def test_in_float32_the_replay_is_transformers_replay(ran: dict[str, Any], case: str) -> None:
    found = ran["float32"][case]
    assert found["obeyed"]
    assert gap(found["logprobs"], found["expected"]) < 1e-5
    # Other routes are another policy, which both sides agree on.
    moved = gap(found["logprobs"], ran["float32"]["own"][0]["expected"])
    assert moved < 1e-5 if case == "recorded" else moved > 0.2


@pytest.mark.parametrize("case", ["R2", "own"])
def test_the_models_own_routes_change_nothing(ran: dict[str, Any], case: str) -> None:
    native, replayed = ran["replay"]["native"], ran["replay"][case]
    for name in ("logprobs", "grad_norm", "loss", "parameters", "lr"):
        assert replayed[name] == native[name]


def test_other_routes_are_taken_in_both_passes(ran: dict[str, Any]) -> None:
    other = ran["replay"]["other"]
    assert other["obeyed"] and not other["own"]
    assert gap(other["logprobs"], ran["replay"]["native"]["logprobs"]) > 0.2
    assert other["parameters"] != ran["replay"]["native"]["parameters"]


def test_only_passes_over_other_tokens_are_counted(ran: dict[str, Any]) -> None:
    for case in ("own", "other"):
        assert ran["replay"][case]["metrics"] == {"routing/other_passes": 0.0}


@pytest.mark.parametrize("case, words", [("sample", "has 0 rows"), ("tail", "has 8 rows"), ("update", "has 0 rows")])
def test_lost_routes_are_refused_by_their_sample(ran: dict[str, Any], case: str, words: str) -> None:
    found = ran["replay"]["lost"][case]
    assert found.startswith("RoutingError: request 1 of rank 0's mini-batch (uid second): routing " + words)


@pytest.mark.parametrize(
    "case, words",
    [
        ("range", "row 2, layer 1: expert id 16 is out of range"),
        ("negative", "row 2, layer 1: expert id -1 is out of range"),
        ("duplicate", "row 2, layer 1: duplicate expert ids"),
        ("wide", "routing has 5 experts per token; allowed: 4"),
    ],
)
def test_an_update_refuses_what_no_top_k_can_choose(ran: dict[str, Any], case: str, words: str) -> None:
    found = ran["replay"]["outside"][case]
    assert found.startswith("RoutingError: request ") and words in found


def test_a_batch_without_routes_is_refused(ran: dict[str, Any]) -> None:
    for found in (ran["replay"]["lost"]["all"], ran["replay"]["R2_lost"]):
        assert found.startswith("RoutingError: the batch of 4 samples has no 'routed_experts'")


@pytest.mark.parametrize("report, mode", [("report", "R3"), ("R2_report", "R2")])
def test_the_worker_reports_what_is_active(ran: dict[str, Any], report: str, mode: str) -> None:
    found = ran["replay"][report]
    assert (found["engine"], found["strategy"], found["routing"]) == ("MismatchMegatronEngine", "megatron", mode)
    assert [patch["name"] for patch in found["patches"]] == ["verl/megatron_closed_topk"]
    assert list(found["trainer"]["parameter_dtypes"]) == ["bfloat16"]


def test_the_worker_reports_what_is_recorded_of_it(ran: dict[str, Any]) -> None:
    assert shape({"workers": [ran["replay"]["report"]]}) == shape(recorded("megatron"))


def test_routes_follow_their_samples_into_micro_batches(ran: dict[str, Any]) -> None:
    layouts = ran["layouts"]
    assert layouts["whole"]["obeyed"] and layouts["recomputed"]["obeyed"]
    assert {name: found["calls"] for name, found in layouts.items()} == {
        "whole": 2,  # scored, and learned from
        "one_by_one": 8,
        "dynamic": 4,
        "recomputed": 3,
    }
    for name in ("one_by_one", "dynamic"):
        assert gap(layouts[name]["logprobs"], layouts["whole"]["logprobs"]) < 0.05
    assert layouts["recomputed"]["parameters"] == layouts["whole"]["parameters"]


def test_the_reference_is_not_replayed(ran: dict[str, Any]) -> None:
    found = ran["reference"]
    assert found["before"] == found["after"] == found["expected"]
    assert found["before_obeyed"] and found["after_obeyed"]


def test_weights_leave_as_they_came(ran: dict[str, Any]) -> None:
    assert ran["weights"] == {"names": True, "equal": True, "count": 117}


def test_a_checkpoint_holds_the_weights_and_the_schedule_if_asked(ran: dict[str, Any]) -> None:
    found = ran["checkpoint"]
    assert found["loaded_True"] == found["loaded_False"] == found["saved"]
    # verl returns the next rate: of update 3 of 12, and after its default, which begins the schedule anew, of update 1.
    assert found["straight"] == found["resumed_True"] == [pytest.approx(1e-3 * 9 / 12)]
    assert found["resumed_False"] == [pytest.approx(1e-3 * 11 / 12)]


def cosine(step: int) -> float:
    """The share of a rate that is left after steps 2 to 12 of Megatron's cosine."""
    return 0.5 * (math.cos(math.pi * (step - 2) / 10) + 1)


# Rates of six updates over 1e-4: a period of two updates, counted from the end of a warm-up of two. Warm-up starts at 0.
RATES = {
    "constant": [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4],
    "linear": [0, 0.5, 1, 0.9, 0.8 / 2, 0.7 / 2],
    "cosine": [0, 0.5, 1, cosine(3), cosine(4) / 2, cosine(5) / 2],
}


@pytest.mark.parametrize("schedule", list(RATES))
def test_every_step_takes_the_schedules_rate_times_the_multiplier(ran: dict[str, Any], schedule: str) -> None:
    found = ran["rates"][schedule]
    wanted = [1e-4 * rate for rate in RATES[schedule]]
    steps = 2 if schedule == "constant" else 1  # mini-batches per update
    assert found["groups"] == 2
    assert found["seen"] == pytest.approx([rate for rate in wanted for _ in range(2 * steps)], rel=1e-9)
    assert found["logged"] == [[pytest.approx(rate, rel=1e-9)] for rate in wanted]


def test_in_float32_the_optimizer_takes_the_same_rates(ran: dict[str, Any]) -> None:
    found, half = ran["float32"]["rates"], ran["rates"]["constant"]
    assert (found["seen"], found["logged"]) == (half["seen"], half["logged"])
    assert found["parameters"] != half["parameters"]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_resumed_run_takes_the_same_rates(ran: dict[str, Any], schedule: str) -> None:
    found = ran["rates"][schedule]
    assert found["resumed"]["seen"] == found["seen"][6:]
    assert found["resumes"] == [True, True]
    assert found["resumed"]["logged"] == found["logged"][3:]


def test_the_state_of_another_trigger_is_refused(ran: dict[str, Any]) -> None:
    words = "RecordError: the state of mismatch.lr is of trigger 'response_length'"
    assert ran["rates"]["other_trigger"].startswith(words)


def test_the_worker_says_what_the_rate_is_led_by(ran: dict[str, Any]) -> None:
    found = ran["rates"]["constant"]
    assert (found["before"], found["report"]["lr"]) == (1.0, 0.125)  # of the next update: the seventh
    assert found["metrics"] == {"lr_multiplier": 0.25, "lr_surges": 0.0, "lr_period": 2.0}


def test_without_lr_verl_logs_the_next_rate_and_takes_its_own(ran: dict[str, Any]) -> None:
    found = ran["rates"]["stock"]
    wanted = [1e-4 * rate for rate in (0, 0.5, 1, cosine(3), cosine(4), cosine(5), cosine(6))]
    assert found["seen"] == pytest.approx([rate for rate in wanted[:6] for _ in range(2)], rel=1e-9)
    assert found["logged"] == [[pytest.approx(rate, rel=1e-9)] for rate in wanted[1:]]


def test_a_surge_lowers_the_rate_of_the_update_that_learns_from_it(ran: dict[str, Any]) -> None:
    found = ran["surge"]
    assert found["logged"] == pytest.approx([1e-4, 1e-4, 5e-5, 5e-5], rel=1e-9)
    assert [answer["lr_multiplier"] for answer in found["answers"]] == [1.0, 1.0, 0.5, 0.5]
    assert found["metrics"] == {
        "lr_multiplier": 0.5, "lr_surges": 1.0, "lr_surge_step": 1.0, "lr_period": 2.0, "lr_surge_threshold": 20.0,
    }  # fmt: skip
    for refused in (found["without"], found["again"]):
        assert refused.startswith(
            "ConfigError: mismatch.lr.trigger='response_length', but the trainer gave no statistics"
        )


def test_optimizers_in_one_have_one_rate(ran: dict[str, Any]) -> None:
    one, two = ran["surge"]["chained"]
    assert one == two == pytest.approx([1e-4, 1e-4, 5e-5, 5e-5], rel=1e-9)


@pytest.mark.parametrize(
    "case, words",
    [
        ("precision_aware", "AdamW in verl's Megatron engine: this release has not been tried with a precision-aware"),
        ("offloaded", "HybridDeviceOptimizer in verl's Megatron engine: it steps optimizers of its own"),
        ("not_torchs", "DistributedOptimizer in verl's Megatron engine: it is no torch.optim.Optimizer"),
        ("empty", "ChainedOptimizer in verl's Megatron engine: this rank has no parameters"),
    ],
)
def test_an_optimizer_that_cannot_be_led_is_refused(ran: dict[str, Any], case: str, words: str) -> None:
    found = ran["surge"]["refused"]
    assert found["accepted"] == "nothing was refused"
    assert found[case].startswith("ConfigError: mismatch.lr cannot lead the rate of " + words)
