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
    one = (scenarios.stock, scenarios.float32, scenarios.replay, scenarios.layouts, scenarios.surge)
    given: dict[str, Any] = {scenario.__name__: {"model": moe} for scenario in one}
    given["rates"] = {"model": moe, "out": tmp_path_factory.mktemp("rates")}
    # Megatron is imported with stubs that this scenario removes, and there is no other to share its imports with.
    found: dict[str, Any] = run(scenarios.several, timeout=400, fresh=True, scenarios=given).expect()
    assert found["stubs_called"] == found["stubs_left"] == []
    return found


def gap(one: list[list[float]], two: list[list[float]]) -> float:
    return max(abs(a - b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


def test_a_block_that_measures_changes_nothing(ran: dict[str, Any]) -> None:
    stock = ran["stock"]
    assert stock["verl"].pop("class") == "MegatronEngineWithLMHead"
    assert stock["monitor"].pop("class") == "MismatchMegatronEngine"
    assert stock["monitor"] == stock["verl"] and stock["verl"]["grad_norm"] > 0.1


def test_in_float32_the_engine_takes_the_recorded_routes_by_itself(ran: dict[str, Any]) -> None:
    for batch in ran["float32"]["own"]:
        assert (batch["pairs"], batch["differing"]) == (2 * (14 + 12 + 10 + 9), 0)
        assert gap(batch["logprobs"], batch["expected"]) < 1e-5


@pytest.mark.parametrize("case", ["recorded", "other"])
def test_in_float32_the_replay_is_transformers_replay(ran: dict[str, Any], case: str) -> None:
    found = ran["float32"][case]
    assert found["obeyed"]
    assert gap(found["logprobs"], found["expected"]) < 1e-5
    # Other routes are another policy, which both sides agree on.
    moved = gap(found["logprobs"], ran["float32"]["own"][0]["expected"])
    assert moved < 1e-5 if case == "recorded" else moved > 0.2


def test_the_models_own_routes_change_nothing_and_other_ones_are_taken_in_both_passes(ran: dict[str, Any]) -> None:
    native = ran["replay"]["native"]
    for case in ("R2", "own"):
        replayed = ran["replay"][case]
        assert {name: replayed[name] for name in native} == native
    other = ran["replay"]["other"]
    assert other["obeyed"] and not other["own"]
    assert gap(other["logprobs"], native["logprobs"]) > 0.2
    assert other["metrics"] == {"routing/other_passes": 0.0}


def test_wrong_routes_are_refused_by_their_sample(ran: dict[str, Any]) -> None:
    lost, outside = ran["replay"]["lost"], ran["replay"]["outside"]
    for found, words in ((lost["sample"], "has 0 rows"), (lost["tail"], "has 8 rows")):
        assert found.startswith("RoutingError: request 1 of rank 0's mini-batch (uid second): routing " + words)
    assert "row 2, layer 1: expert id 16 is out of range" in outside["range"]
    assert "row 2, layer 1: duplicate expert ids" in outside["duplicate"]
    for found in (lost["all"], ran["replay"]["R2_lost"]):
        assert found.startswith("RoutingError: the batch of 4 samples has no 'routed_experts'")


def test_the_worker_reports_what_is_active_as_it_is_recorded(ran: dict[str, Any]) -> None:
    for report, mode in (("report", "R3"), ("R2_report", "R2")):
        found = ran["replay"][report]
        assert (found["engine"], found["routing"]) == ("MismatchMegatronEngine", mode)
        assert [patch["name"] for patch in found["patches"]] == ["verl/megatron_closed_topk"]
    assert shape({"workers": [ran["replay"]["report"]]}) == shape(recorded("megatron"))


def test_routes_follow_their_samples_into_micro_batches(ran: dict[str, Any]) -> None:
    layouts = ran["layouts"]
    assert layouts["whole"]["obeyed"] and layouts["recomputed"]["obeyed"]
    # Scored, and learned from.
    assert {name: found["calls"] for name, found in layouts.items()} == {"whole": 2, "one_by_one": 8, "recomputed": 3}
    assert gap(layouts["one_by_one"]["logprobs"], layouts["whole"]["logprobs"]) < 0.05
    assert layouts["recomputed"]["parameters"] == layouts["whole"]["parameters"]


def cosine(step: int) -> float:
    """The share of a rate that is left after steps 2 to 12 of Megatron's cosine."""
    return 0.5 * (math.cos(math.pi * (step - 2) / 10) + 1)


# Rates of six updates over 1e-4: a period of two updates, counted from the end of a warm-up of two. Warm-up starts at 0.
RATES = {
    "constant": [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4],
    "cosine": [0, 0.5, 1, cosine(3), cosine(4) / 2, cosine(5) / 2],
}


@pytest.mark.parametrize("schedule", list(RATES))
def test_every_step_takes_the_schedules_rate_times_the_multiplier(ran: dict[str, Any], schedule: str) -> None:
    found = ran["rates"][schedule]
    wanted = [1e-4 * rate for rate in RATES[schedule]]
    steps = 2 if schedule == "constant" else 1  # mini-batches per update, of two groups of parameters each
    assert found["seen"] == pytest.approx([rate for rate in wanted for _ in range(2 * steps)], rel=1e-9)
    assert found["logged"] == [[pytest.approx(rate, rel=1e-9)] for rate in wanted]


def test_a_resumed_run_takes_the_same_rates_and_no_state_of_another_trigger(ran: dict[str, Any]) -> None:
    found = ran["rates"]
    assert found["resumed"]["seen"] == found["cosine"]["seen"][6:]
    assert found["resumed"]["logged"] == found["cosine"]["logged"][3:]
    assert found["other_trigger"].startswith("RecordError: the state of mismatch.lr is of trigger 'response_length'")


def test_a_surge_lowers_the_rate_of_the_update_that_learns_from_it(ran: dict[str, Any]) -> None:
    found = ran["surge"]
    assert found["logged"] == pytest.approx([1e-4, 1e-4, 5e-5, 5e-5], rel=1e-9)
    assert [answer["lr_multiplier"] for answer in found["answers"]] == [1.0, 1.0, 0.5, 0.5]
    for refused in (found["without"], found["again"]):
        assert refused.startswith(
            "ConfigError: mismatch.lr.trigger='response_length', but the trainer gave no statistics"
        )
    optimizers = found["refused"]
    assert optimizers["accepted"] == "nothing was refused"
    for case, words in (("precision_aware", "AdamW in verl's"), ("not_torchs", "DistributedOptimizer in verl's")):
        assert optimizers[case].startswith(f"ConfigError: mismatch.lr cannot lead the rate of {words} Megatron engine")
