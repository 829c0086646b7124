"""Rollouts of older weights: which of them, and of their routes, an asynchronous host takes."""

from __future__ import annotations

import pytest

from mismatch_ext.errors import RecordError, RoutingError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.rollout import EngineAnswer, Origins, SamplingSettings
from mismatch_ext.routing.trace import expect_weights

READING = EngineReading(
    engine="vllm",
    version="0.30.0",
    model_dtype="float32",
    parameter_dtypes={"float32": 1},
    kv_cache_dtype="auto",
    logprobs_mode="raw_logprobs",
    quantization=None,
)


@pytest.fixture
def origins() -> Origins:
    found = Origins(SamplingSettings())
    found.sent(3, [EngineAnswer(name="one", reading=READING, patch_digest="ab", weight_version=3)])
    return found


def test_older_and_partly_older_rollouts_are_taken_where_they_are_asked_for(origins: Origins) -> None:
    rollouts = [("a", 3, 3), ("b", 1, 1), ("c", 0, 2)]
    assert origins.check(rollouts, older=True).weight_version == 3
    with pytest.raises(RecordError):
        origins.check(rollouts)


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (3, 4, "rollout b was sampled with weight_version=3 to 4, and the engines have weight_version=3"),
        (2, 1, "versions rise"),
        (None, 3, "rollout b has no weight version"),
        (3, None, "rollout b has no weight version"),
    ],
)
def test_weights_that_no_engine_had_are_refused(
    origins: Origins, first: int | None, last: int | None, words: str
) -> None:
    with pytest.raises(RecordError, match=words):
        origins.check([("a", 3, 3), ("b", first, last)], older=True)


def test_older_routes_are_taken_and_newer_refused() -> None:
    assert expect_weights((1, 3), 3, "a", older=True) == 1
    assert expect_weights((3, 3), 3, "a") == 3
    assert expect_weights(None, None, "a") is None
    for span, older in (((1, 3), False), ((3, 4), True), ((3, 1), False)):
        with pytest.raises(RoutingError, match="expected 3"):
            expect_weights(span, 3, "a", older=older)
    with pytest.raises(RoutingError, match="nobody says which weights"):
        expect_weights(None, 3, "a")
