"""Real SGLang on a CPU, with torch-native kernels: log-probabilities, routes, weight updates and refusals, reached in two ways.

One process per version, way and dtype does everything; the tests look at parts of what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from tests.oracle import FACTOR
from tests.peers.engines.sglang_environment import RUN_FIRST, VERSIONS

pytestmark = pytest.mark.engine
EXACT = [
    pytest.param(asked, id="-".join(asked), marks=[] if asked == (RUN_FIRST, "engine") else pytest.mark.nightly)
    for asked in product(VERSIONS, ("engine", "http"))
]


@pytest.fixture(scope="module", params=EXACT)
def exact(request: pytest.FixtureRequest, sglang_in_float32: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Return what a version of SGLang did in float32, reached in one way."""
    version, way = request.param
    return {"way": way, **sglang_in_float32(version, way), "want": version}


def test_the_version_is_the_one_asked_for_and_the_server_is_fit(exact: dict[str, Any]) -> None:
    assert exact["version"] == exact["want"]
    # Of a server elsewhere, the environment is not known.
    notes = exact["notes"]
    assert ["RETURN_ORIGINAL_LOGPROB is assumed" in note for note in notes] == [True] * (exact["way"] == "http")


def test_no_compiled_kernel_was_called(exact: dict[str, Any]) -> None:
    # Fetched at import, so the stub is what SGLang found; computing was torch's alone.
    assert exact["stub"]["fetched"] > 0 and exact["stub"]["called"] == 0


# Responses, at least so many sampled tokens, and how many prompt tokens may have come from the prefix cache.
WAYS = {
    "chunked": (1, 8, 0, 0),
    "same prompt again": (1, 8, 199, 199),
    # Random prompts of 16 tokens begin alike here and there.
    "concurrent": (8, 480, 0, 20),
    "groups": (9, 40, 0, 200),
    "stop tokens": (12, 20, 0, 30),
    "temperature": (4, 10, 0, 20),
    # 20 tokens of the prompt and 8 that the first turn sampled. The last of these the model was given in 0.5.12 and 0.5.18 alone,
    # whose scheduler is a step ahead of what it knows to have ended.
    "second turn": (1, 8, 27, 28),
    # The prompts of "concurrent" again, of which the cache holds 360 tokens if it was not flushed.
    "after an update": (8, 480, 0, 20),
    "after small buckets": (4, 20, 0, 20),
}


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_and_routes_are_transformers(exact: dict[str, Any], way: str) -> None:
    found, (responses, sampled, least, most) = exact["rollouts"][way], WAYS[way]
    assert found["responses"] == responses and found["sampled"] >= sampled
    assert found["logp"] < FACTOR * found["float32_error"]
    assert found["differing"] == 0 and found["routed"] > 0
    assert least <= found["cached"] <= most


def test_rows_and_reasons(exact: dict[str, Any]) -> None:
    ways = exact["rollouts"]
    # 200 prompt tokens and 8 sampled ones, the last of which has no row.
    assert ways["chunked"]["rows"] == [207]
    assert ways["chunked"]["reasons"] == ["length"] and "stop" in ways["stop tokens"]["reasons"]


def test_a_later_turn_has_the_routes_that_the_cache_keeps_of_the_turn_before(exact: dict[str, Any]) -> None:
    # No row is missing of what was not computed again: 20 + 8 tokens, 7 of a tool, and 8 sampled ones but the last.
    found = exact["rollouts"]["second turn"]
    assert found["rows"] == [20 + 8 + 7 + 8 - 1] and found["as sampled"]


def test_prompts_are_scored_as_by_transformers(exact: dict[str, Any]) -> None:
    assert exact["scored"] < FACTOR * exact["scored_float32_error"]


def test_a_weight_update_shows_in_the_next_log_probabilities(exact: dict[str, Any]) -> None:
    # The same tokens under the weights before: far away.
    assert exact["weights"]["moved"] > 0.1
    assert exact["rollouts"]["after an update"]["stamps"] == ["1"]
    assert exact["rollouts"]["after small buckets"]["stamps"] == ["4"]


def test_stale_and_garbled_updates_are_told_from_good_ones(exact: dict[str, Any]) -> None:
    # Trained and sent; trained and sent without the experts, which SGLang drops silently; sent in small buckets.
    assert exact["weights"]["statuses"] == ["in_sync", "garbled", "unchanged"]


def test_what_must_not_be_sent_is_refused(exact: dict[str, Any]) -> None:
    found = exact["weights"]
    assert (
        found["fused"].startswith("RecordError: model.layers.0.mlp.experts.")
        and "checkpoint_parameters" in found["fused"]
    )


def test_half_an_update_is_told_by_its_stamp_and_not_sampled_from(exact: dict[str, Any]) -> None:
    found = exact["weights"]
    assert found["failed"].startswith("PrecisionError: model.norm.weight: 64 of 64 weights are NaN")
    assert found["stamp"] == "9-incomplete"
    assert "may hold a mixture of weights" in found["refused"]


def test_a_server_is_paused_around_an_update(exact: dict[str, Any]) -> None:
    if exact["way"] == "http":
        found = exact["refusals"]["paused"]
        # The stream that ran was ended before its 450 tokens, and the server serves again.
        assert found["reason"] == "abort" and 0 < found["sampled"] < 450
        assert found["stamp"] == "paused"


def test_what_sglang_refuses_is_an_error(exact: dict[str, Any]) -> None:
    found = exact["refusals"]
    # 600 tokens for a model of 512.
    assert found["long"].startswith(("EngineError: ", "Refused: ")) and "600" in found["long"]
    # What SGLang does not: its scheduler would end.
    unknown = found["unknown token"]
    assert unknown.startswith("RecordError: input_ids[1][1]: token id 16 ") and "0 to 15, its model has 16" in unknown
