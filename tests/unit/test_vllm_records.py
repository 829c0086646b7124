"""Outputs of vLLM become records, or an error that names what is wrong; what a real engine returns is held elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mismatch_ext.adapters.vllm import to_records

from mismatch_ext.errors import EngineError, RecordError, RoutingError
from tests.unit.sglang_recorded import PROMPT, SHAPE, provenance


def output(prompt: Any = PROMPT, logprobs: Any = (-0.5, -1.5), reason: str | None = "stop", count: int = 1) -> Any:
    """Return what vLLM answers, as far as it is read."""
    ids = [21, 22]
    tops = logprobs and [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, logprobs, strict=False)]
    of = [
        SimpleNamespace(index=index, token_ids=ids, logprobs=tops, finish_reason=reason, routed_experts=None)
        for index in range(count)
    ]
    return SimpleNamespace(request_id="7", prompt_token_ids=prompt, outputs=of)


def test_every_completion_of_a_prompt_is_a_record_in_order() -> None:
    other = list(PROMPT[:2])
    outputs = [output(count=2), output(other, count=2)]
    records = to_records(outputs, prompt_ids=[PROMPT, other], provenance=provenance(), n=2)
    assert [r.prompt_ids.tolist() for r in records] == [list(PROMPT)] * 2 + [other] * 2
    for record in records:
        assert record.response_ids.tolist() == [21, 22] and record.rollout_logprobs.tolist() == [-0.5, -1.5]
        assert record.finish_reason == "stop"


@pytest.mark.parametrize(
    ("changed", "options", "error", "message"),
    [
        ({"prompt": [1, 2]}, {}, RecordError, "request 7: vLLM's output is of another prompt"),
        ({"reason": None}, {}, RecordError, "request 7/0: finish_reason is None"),
        ({"reason": "abort"}, {}, EngineError, "request 7/0: vLLM ended it with finish_reason 'abort'"),
        ({"logprobs": None}, {}, RecordError, "2 response tokens and none log-probabilities"),
        ({"count": 2}, {}, RecordError, "2 responses for 1 prompts with n=1; allowed: 1"),
        ({}, {"shape": SHAPE}, RoutingError, "request 7/0: vLLM returned no routing"),
    ],
)
def test_what_is_malformed_is_refused_by_name(
    changed: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        to_records([output(**changed)], prompt_ids=[PROMPT], provenance=provenance(), **options)


def test_what_came_from_the_prefix_cache_is_known_of_one_response_per_prompt() -> None:
    cached = [output(), output()]
    cached[1].num_cached_tokens = 16
    one = to_records(cached, prompt_ids=[PROMPT] * 2, provenance=provenance())
    assert [record.cached_tokens for record in one] == [None, 16]
    several = output(count=2)
    several.num_cached_tokens = 16
    two = to_records([several], prompt_ids=[PROMPT], provenance=provenance(), n=2)
    assert [record.cached_tokens for record in two] == [None, None]


def test_a_response_with_a_logprob_that_is_not_finite_has_a_fault() -> None:
    (record,) = to_records([output(logprobs=(-0.5, float("nan")))], prompt_ids=[PROMPT], provenance=provenance())
    assert record.fault is not None
    assert record.fault.reason == "rollout_logprobs"
    assert "rollout 0, token 1" in record.fault.message


def test_a_row_whose_likely_tokens_are_no_distribution_is_bad_and_the_others_are_not() -> None:
    outputs = [output(), output(), output()]
    for number, answer in enumerate(outputs):
        # The second place of the second row has two tokens with .9 and .8.
        second = (-0.105, -0.223) if number == 1 else (-1.5, -2.0)
        answer.outputs[0].logprobs = [
            {21: SimpleNamespace(logprob=-0.5, rank=1), 30: SimpleNamespace(logprob=-1.0, rank=2)},
            {22: SimpleNamespace(logprob=second[0], rank=1), 30: SimpleNamespace(logprob=second[1], rank=2)},
        ]
    records = to_records(outputs, prompt_ids=[PROMPT] * 3, provenance=provenance(), top_k=2)
    assert [record.head is None for record in records] == [False, True, False]
    fault = records[1].fault
    assert fault is not None and fault.reason == "head" and "more probability than 1" in fault.message
    assert records[0].fault is None and records[2].fault is None
    with pytest.raises(RecordError, match="more probability than 1"):
        to_records([outputs[1]] * 3, prompt_ids=[PROMPT] * 3, provenance=provenance(), top_k=2)
