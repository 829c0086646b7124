"""Weight updates: a server that does not answer says nothing, servers come and go, and a wrong one is found by its own answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_weights as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_weights")

NOTHING = "nothing was refused"
UNKNOWN = ("warning", "weight_sync_unanswered")


def test_a_server_that_does_not_answer_three_times_ends_nothing_and_the_others_are_judged(run: Run) -> None:
    found = run(scenarios.too_slow).expect()
    assert found["raised"] == [NOTHING] * 5
    assert [tuple(event[:2]) for event in found["said"]] == [UNKNOWN] * 3
    assert found["unanswered"] == [3, 0]
    assert found["gap"] is not None and found["gap"] < 1e-9 and found["after"] < 1e-9


def test_a_garbled_server_is_found_beside_one_that_does_not_answer(run: Run) -> None:
    found = run(scenarios.wrong).expect()
    first, second = found["raised"]
    assert first == NOTHING and second.startswith("WeightSyncError: ")
    assert [tuple(event[:2]) for event in found["said"]] == [("error", "weight_sync"), UNKNOWN]


def test_engines_without_priorities_are_judged_before_the_next_update(run: Run) -> None:
    found = run(scenarios.in_flight).expect()
    assert found["priority"] == {"raised": [NOTHING], "said": [], "at once": True}
    fcfs = found["fcfs"]
    assert not fcfs["at once"] and found["waiting"]
    *fine, last, after = fcfs["raised"]
    assert fine == [NOTHING] * 4 and after == NOTHING
    assert found["goes on"] and found["at the end"] == NOTHING and found["gap at the end"] < 1e-9
    # The answer came after the next update, so nothing is known; then the garbled update is found before the one after it.
    assert [tuple(event[:2]) for event in fcfs["said"]] == [UNKNOWN, ("error", "weight_sync")]
    assert last.startswith("WeightSyncError: ")


def test_a_server_that_is_silent_in_the_background_leaves_no_other_one_unknown(run: Run) -> None:
    found = run(scenarios.one_silent).expect()
    assert found["gaps"][0] is None and found["gaps"][1] < 1e-9
    *fine, last = found["raised"]
    assert fine == [NOTHING] * 5 and last.startswith("WeightSyncError: weight update 4: garbled.")
    said = [tuple(event[:2]) for event in found["said"]]
    assert said == [UNKNOWN, UNKNOWN, UNKNOWN, ("error", "weight_sync")]


def test_a_servers_weights_are_read_before_it_sleeps(run: Run) -> None:
    assert run(scenarios.asleep).expect() == {"read asleep": [False]}


def test_the_driver_follows_verls_own_list_of_servers(run: Run) -> None:
    found = run(scenarios.managed).expect()
    assert found == {
        "start": ["first", "second"],
        "added": ["first", "second", "third"],
        "removed": ["second", "third"],
    }


def test_a_server_that_verl_stops_has_not_answered(run: Run) -> None:
    found = run(scenarios.stopped).expect()
    assert found["aborted"] == "EngineError: the rollout server was stopped before it could decode after probe tokens"
    assert found["short"].startswith("EngineError: the rollout server decoded answers of different lengths")


def test_servers_that_verl_adds_are_verified_from_their_first_update_on(run: Run) -> None:
    found = run(scenarios.elastic).expect()
    assert found["kept"] and found["counts"] == [2, 2, 1]
    assert found["raised"][:2] == [NOTHING] * 2 and found["raised"][3] == NOTHING
    assert found["raised"][2].startswith("WeightSyncError: ")
    ((level, name, message),) = [event for event in found["said"] if event[0] == "error"]
    assert name == "weight_sync" and message.startswith("rollout server 1: ")


def test_ranks_of_the_actor_that_have_parted_are_found(run: Run) -> None:
    found = run(scenarios.parted).expect()
    assert found["alike"] == NOTHING
    assert found["apart"].startswith("WeightSyncError: the actor's rank 2 scores probe tokens 0.5 nats from rank 0")
    assert [event[:2] for event in found["said"]] == [["error", "weight_sync"]]
    # Up to ten times what ranks differed by at first is rounding.
    assert (found["at first"], found["rounding"]) == (NOTHING,) * 2
    assert found["parted"].startswith("WeightSyncError: the actor's rank 2 scores probe tokens 0.6 nats from rank 0")
    assert found["not finite"].startswith(
        "WeightSyncError: the actor's rank 2 scores probe tokens inf nats from rank 0"
    )


def test_a_server_that_does_not_say_its_version_is_unknown_after_the_first_update(run: Run) -> None:
    found = run(scenarios.followed).expect()
    assert found["first"]["raised"][0].startswith("EngineError: rollout server 1 does not say what it runs with")
    late = found["late"]
    assert late["raised"] == [NOTHING] * 4 and late["versions"] == [0, 1, 2, 3]
    assert [tuple(event[:2]) for event in late["said"]] == [UNKNOWN] * 2
    assert found["engine"]["raised"] == [NOTHING] * 2
    assert found["bug"]["raised"][1].startswith("EngineError: rollout server 1 does not say what it runs with")
    assert found["none"] == {"raised": NOTHING, "version": 2}


def test_only_a_servers_own_failure_is_one_of_the_engine(run: Run) -> None:
    found = run(scenarios.failures).expect()
    assert found["late"] == found["of verl's method"] == "EngineError"
    assert found["of the engine in our method"] == "EngineError"
    assert found["of the driver"] == "TypeError" and "KeyError" in found["of our method"]


def test_probes_come_first_where_the_engine_has_priorities(run: Run) -> None:
    assert run(scenarios.asked_first).expect() == [[-(1 << 20)] * 2, [None] * 2]
