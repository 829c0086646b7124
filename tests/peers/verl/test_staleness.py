"""Numerics told from drift in verl: tokens by the versions that sampled them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from pathlib import Path

    from tests.peers.verl.in_process import scenarios_staleness as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_staleness")


def test_a_worker_measures_each_token_by_its_version(run: Run) -> None:
    found = run(scenarios.parts).expect()
    # Segments that begin behind another prompt are of a later turn, and say nothing of what is before it.
    assert found["segments"] == [[[6, 0], [7, 2]], [[7, 0]], [[None, 0]]]
    assert found["first_turn"] == [[None, 0]]  # as a loop keeps it that asks for each turn under another id
    of_batch = found["batch"]
    assert of_batch["numerics/batch/tokens"] == 5 and of_batch["staleness_max"] == 1
    assert of_batch["numerics/logp_abs_diff_mean"] == pytest.approx((2 * 1.0 + 3 * 0.5) / 5)
    assert of_batch["unknown_version_frac"] == pytest.approx(2 / 9)
    assert (of_batch["same_version_frac"], of_batch["mixed_routes_frac"]) == (pytest.approx(5 / 9), 0)
    # The first response's end is of this version, and what is before it was routed by older weights.
    replayed = found["replayed"]
    assert replayed["numerics/batch/tokens"] == 3 and replayed["numerics/logp_abs_diff_mean"] == pytest.approx(0.5)
    assert (replayed["same_version_frac"], replayed["mixed_routes_frac"]) == (
        pytest.approx(5 / 9),
        pytest.approx(2 / 9),
    )
    assert found["ahead"].startswith(
        "RecordError: a token was sampled by weights of version 7, and the batch is scored"
    )


def test_the_client_notes_each_request_of_an_answer_over_turns(run: Run) -> None:
    found = run(scenarios.resumed).expect()
    assert found["tokens"] == [[1, 2, 3], [4, 5]] and found["ends"] == [4, 5]
    # Version, and the tokens in front; a request that was interrupted before its first token sampled none.
    assert found["noted"] == [[4, 3], [5, 5], [5, 5], [6, 8], [8, 11]] and found["shared"]
    # A token keeps the experts that it was sampled with, up to where a turn was given other tokens. They travel by themselves.
    assert found["routes"][0] == [4, 4, 4, 4, 5]
    assert found["routes"][1] == [4, 4, 4, 4, 5, 6, 6, 6, 6]
    assert found["routes"][2] == [4, 4, 4, 4, 5, 6, 6, 6, 6, 8, 8] and not found["pickled"]
    assert found["other"] == "object"


def test_answers_under_one_id_keep_their_own_versions(run: Run) -> None:
    assert run(scenarios.one_id).expect() == [[[4, 2]], [[5, 2]], [[6, 2]]]


def test_versions_that_cannot_be_read_end_no_run_that_is_observed(run: Run, dense: Path) -> None:
    found = run(scenarios.unreadable, model=dense).expect()
    assert found["enforce"] == "AttributeError"
    assert found["observe"] == 5 and found["observe_findings"] == ["gap"]
