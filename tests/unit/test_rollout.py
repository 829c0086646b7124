"""Rollout records refuse what is malformed, and batches refuse what is mixed."""

from __future__ import annotations

import dataclasses
import math
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.rollout import (
    Provenance,
    RolloutRecord,
    SamplingSettings,
    collate,
    expect_present,
    sampled_by,
    to_records,
)
from mismatch_ext.routing import RoutingTrace

ORIGIN = Provenance(
    engine="vllm", engine_version="0.30.0", dtype="float16", kv_cache_dtype="float16", weight_version=3,
    patch_digest="ab", sampling=SamplingSettings(), logprobs_mode="processed_logprobs",
)  # fmt: skip


def record(**changes: Any) -> RolloutRecord:
    """Return a record of a two-token prompt and a three-token response."""
    fields: dict[str, Any] = {
        "prompt_ids": (5, 6), "response_ids": (7, 8, 9), "rollout_logprobs": (-0.5, -1.0, -2.0),
        "response_mask": (True, True, True), "finish_reason": "stop", "provenance": ORIGIN, "request_id": "r1",
    }  # fmt: skip
    return RolloutRecord(**{**fields, **changes})


def test_a_batch_holds_prompts_and_responses_one_after_the_other() -> None:
    short = record(prompt_ids=(4,), response_ids=(3,), rollout_logprobs=(-0.1,), response_mask=(True,))
    batch = collate([record(), short, record()])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0], [5, 6, 7, 8, 9]]
    assert batch.attention_mask.sum(1).tolist() == [5, 2, 5] and batch.prompt_lengths.tolist() == [2, 1, 2]
    assert batch.response_mask[1].tolist() == [True, False, False]
    assert torch.equal(batch.rollout_logprobs[1], torch.tensor([-0.1, 0.0, 0.0]))
    assert batch.provenance == ORIGIN and batch.groups.tolist() == [0, 1, 0]
    assert batch.rows(1, 2).records == (short,) and batch.rows(1, 2).tokens.shape == (1, 5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight_version", 4), ("dtype", "bfloat16"), ("patch_digest", "cd"), ("sampling", SamplingSettings(top_p=0.9))],
)
def test_mixed_provenance_names_field_row_and_values(field: str, value: Any) -> None:
    other = record(provenance=dataclasses.replace(ORIGIN, **{field: value}))
    with pytest.raises(RecordError) as caught:
        collate([record(), record(), other])
    assert all(word in str(caught.value) for word in (field, "row 2", repr(value), repr(getattr(ORIGIN, field))))


def test_missing_provenance_is_refused() -> None:
    with pytest.raises(RecordError, match="r1 has no provenance"):
        record(provenance=None)
    with pytest.raises(RecordError, match="patch_digest"):
        dataclasses.replace(ORIGIN, patch_digest="")
    with pytest.raises(RecordError, match="float8.*float32, float16, bfloat16"):
        dataclasses.replace(ORIGIN, dtype="float8")


def test_a_batch_carries_each_rows_routes() -> None:
    ids = torch.arange(2, dtype=torch.uint8)
    traces = [RoutingTrace(parts=(ids[row].expand(4, 1, 1),), layers=(0,), num_experts=4) for row in range(2)]
    batch = collate([*(record(routing=trace) for trace in traces), record()])
    assert batch.bad.tolist() == [False, False, True] and batch.routing is not None
    assert batch.routing[:2] == traces and batch.routing[2].rows == 0
    assert batch.records[2].fault is not None and batch.records[2].fault.reason == "routes"


def test_rollouts_of_other_weights_than_the_present_are_refused() -> None:
    expect_present(ORIGIN, 3)
    for version in (2, 4):
        with pytest.raises(RecordError, match=f"rollouts of weight version 3, but the engine is at {version}; gen"):
            expect_present(ORIGIN, version)


def test_what_an_engine_says_of_its_weights_makes_a_rollouts_provenance() -> None:
    assert sampled_by("r1", ORIGIN, 5, 5) == dataclasses.replace(ORIGIN, weight_version=5)
    assert sampled_by("r1", ORIGIN, 4, 5, allow_mixed=True).weight_version == 5
    with pytest.raises(RecordError, match="r1 was sampled with weight_version=4 and weight_version=5"):
        sampled_by("r1", ORIGIN, 4, 5)
    for versions in ((None, 5), (5, None), (None, None)):
        with pytest.raises(RecordError, match="rollout r1 has no weight version"):
            sampled_by("r1", ORIGIN, *versions, allow_mixed=True)
    with pytest.raises(RecordError, match="rollout r1 has no provenance"):
        sampled_by("r1", None, 5, 5)


def test_ids_alone_make_records_and_their_numbers_are_checked() -> None:
    made = to_records([[5, 6]], [[7, 8, 9]], [[-0.5, -1.0, -2.0]], provenance=ORIGIN, finish_reasons=["stop"])
    assert made == [record(request_id="0")]
    (faulty,) = to_records([[5, 6]], [[7, 8]], [[-0.5, None]], provenance=ORIGIN)
    assert faulty.fault is not None and "rollout 0, token 1" in faulty.fault.message
    with pytest.raises(ValueError, match="longer"):
        to_records([[5]], [[7], [8]], [[-0.5], [-0.5]], provenance=ORIGIN)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_logprob_that_is_not_finite_names_its_token_unless_masked(value: float) -> None:
    with pytest.raises(NonFiniteLogprobError, match=r"r1, token 1 \(id 8\)"):
        record(rollout_logprobs=(-0.5, value, -2.0))
    record(rollout_logprobs=(-0.5, value, -2.0), response_mask=(True, False, True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_logprobs": (-0.5, -1.0)}, "3 response tokens, 2 log-probabilities and 3 mask values"),
        ({"response_ids": (7, -8, 9)}, ">= 0"),
        ({"response_ids": (7, 8.7, 9)}, "integers"),  # collate would cut it to 8
        ({"response_mask": (True, 0.5, 2)}, "response_mask holds"),
        ({"rollout_logprobs": (-0.5, None, -2.0)}, "log-probabilities must be numbers"),
    ],
)
def test_lengths_and_ids_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        record(**changes)


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}])
def test_sampling_settings_out_of_range(setting: dict[str, float]) -> None:
    (name,) = setting
    with pytest.raises(RecordError, match=f"sampling {name}=.*allowed"):
        SamplingSettings(**setting)  # type: ignore[arg-type]


def test_bias_of_the_ratio_is_said_exactly_when_there_is_one() -> None:
    assert SamplingSettings(temperature=0.7, top_k=-1).ratio_bias() is None
    assert "too large" in (SamplingSettings(min_p=0.1).ratio_bias(renormalized=False) or "")
    assert "top_p=0.9 and top_k=20" in (SamplingSettings(top_p=0.9, top_k=20).ratio_bias() or "")
    penalty = SamplingSettings(repetition_penalty=1.1)
    assert not penalty.truncates_support and "repetition_penalty=1.1" in (penalty.ratio_bias() or "")


@pytest.mark.parametrize(
    ("start", "rows", "fits"),
    # Five tokens in all: routes of all of them, or of all but the last, from the start or from the response on.
    [(0, 5, True), (0, 4, True), (2, 2, True), (0, 3, False), (2, 4, False), (1, 2, False)],
)
def test_routing_must_end_at_the_last_token_or_the_one_before(start: int, rows: int, fits: bool) -> None:
    trace = RoutingTrace(parts=(torch.zeros(rows, 1, 1, dtype=torch.uint8),), layers=(0,), num_experts=4, start=start)
    with nullcontext() if fits else pytest.raises(RecordError, match="rollout r1: 5 tokens .* routing of positions"):
        assert record(routing=trace).routing is trace


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteLogprobError("row 1")))
    assert isinstance(error, RecordError) and str(error) == "row 1"
