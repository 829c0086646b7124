"""Responses of SGLang become the records that vLLM's adapter yields, or an error that names what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
from mismatch_ext.adapters.sglang import parse_response, to_records

from mismatch_ext.doctor.sample import Sample
from mismatch_ext.errors import EngineError, NonFiniteLogprobError, RecordError, RoutingError
from mismatch_ext.rollout import RolloutRecord
from tests.unit.sglang_recorded import PROMPT, SHAPE, provenance, recorded, response

BF16 = "moe_bf16_0.5.18.json"


def parse(output: Any, **changes: Any) -> RolloutRecord:
    """Parse a response to PROMPT."""
    return parse_response(output, **({"prompt_ids": PROMPT, "provenance": provenance(), "shape": SHAPE} | changes))


def test_a_recording_of_the_engine_gives_tokens_logprobs_and_routes() -> None:
    prompts, outputs = recorded(BF16)
    first, second = to_records(outputs, prompt_ids=prompts, provenance=provenance(), shape=SHAPE)
    assert first.token_ids.tolist() == [5, 9, 17, 33, 65, 167, 40, 167, 162, 185, 48] and len(first.prompt_ids) == 5
    assert first.rollout_logprobs[0] == -4.178915023803711 and first.rollout_logprobs[-1] == -2.922822952270508
    assert (first.finish_reason, first.request_id, first.provenance) == ("length", "0", provenance())
    assert first.routing is not None and second.routing is not None
    assert first.routing.layer(0).tolist()[:3] == [[3, 0], [7, 5], [5, 3]]
    # 5 + 6 and 7 + 6 tokens; the last one was never fed back.
    assert (first.routing.rows, second.routing.rows) == (10, 12)


def test_without_a_shape_no_routes_are_read() -> None:
    assert parse(response(routed_experts="garbage"), shape=None).routing is None


def test_several_responses_per_prompt_stay_beside_each_other() -> None:
    other = [1, 2, 3, 4]
    records = to_records([response()] * 4, prompt_ids=[PROMPT, other], provenance=provenance(), n=2)
    assert [r.prompt_ids.tolist() for r in records] == [list(PROMPT)] * 2 + [list(other)] * 2


def test_an_aborted_request_is_refused_unless_it_is_asked_for() -> None:
    aborted = response(finish_reason={"type": "abort", "message": "out of memory", "status_code": 500})
    with pytest.raises(EngineError, match="request a1, meta_info.finish_reason: SGLang aborted it .*out of memory"):
        parse(aborted)
    assert parse(aborted, allow_abort=True).finish_reason == "abort"


def test_an_answer_that_is_an_error_says_so() -> None:
    with pytest.raises(EngineError, match="request 7: SGLang answered with the error .*too long"):
        parse({"error": {"message": "the prompt is too long"}}, request_id="7")


# Change of the response, and what the message must name.
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"finish_reason": None}, "finish_reason: found None"),
    ({"prompt_tokens": 5}, "prompt_tokens: found 5; allowed: 4, .*another one"),
    ({"completion_tokens": 2}, "completion_tokens: found 2; allowed: 3"),
    ({"output_token_logprobs": None}, "output_token_logprobs: found None; .*return_logprob=true"),
    ({"output_token_logprobs": [[-0.5, 21, None]]}, "allowed: 3 entries, .*not 1"),
    (
        {"output_token_logprobs": [[-1, 21], [-1, 99], [-1, 23]]},
        r"logprobs\[1\]: found \[-1, 99\]; allowed: .*token 22",
    ),
    ({"output_token_logprobs": [[-1.0, 21], [0.5, 22], [-1.0, 23]]}, r"logprobs\[1\]: found \[0.5, 22\]; .*<= 0"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED)
def test_a_malformed_response_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message) as error:
        parse(response(**change))
    assert "request a1, meta_info." in str(error.value)


@pytest.mark.parametrize("ids", [[21, 22, 2**31], [21, -1, 23], [21, True, 23], "abc"])
def test_token_ids_are_integers_in_range(ids: Any) -> None:
    with pytest.raises(RecordError, match="output_ids: found .*; allowed: a list of token ids"):
        parse(response() | {"output_ids": ids})


@pytest.mark.parametrize("output", [None, {"output_ids": [1]}])
def test_what_is_no_response_is_refused(output: Any) -> None:
    with pytest.raises(RecordError, match="request r5, response: found .*allowed: one with meta_info"):
        parse(output, request_id="r5")


@pytest.mark.parametrize("value", [None, math.nan, -math.inf, -65504.0, -3.4028234663852886e38])
def test_a_logprob_that_is_not_finite_is_refused_in_every_form(value: Any) -> None:
    with pytest.raises(NonFiniteLogprobError, match=r"request a1, meta_info.output_token_logprobs\[1\]: "):
        parse(response(output_token_logprobs=[[-1, 21], [value, 22], [-1, 23]]))


def test_a_response_of_a_batch_that_is_wrong_is_a_record_with_a_fault() -> None:
    entries = [[-1, 21], [None, 22], [-1, 23]]
    wrong = {
        "rollout_logprobs": response(output_token_logprobs=entries),
        "routes": response(routed_experts="garbage"),
        "tokens": response(output_token_logprobs=[[-1, 21], [-1, 99], [-1, 23]]),
        "weight_version": response(weight_version="v3"),
    }
    known = {"provenance": provenance(), "shape": SHAPE, "weight_version": "v7"}
    outputs = [response(), *wrong.values()]
    records = to_records(outputs, prompt_ids=[PROMPT] * len(outputs), **known)  # type: ignore[arg-type]
    assert [record.fault and record.fault.reason for record in records] == [None, *wrong]
    assert all(math.isfinite(value) for record in records for value in record.rollout_logprobs)
    with pytest.raises(NonFiniteLogprobError, match=r"request 1, meta_info.output_token_logprobs\[1\]: found"):
        Sample.of(records)


def test_rounding_above_zero_is_no_fault() -> None:
    entries = [[1e-7, 21], [0, 22], [-103.5, 23]]
    assert parse(response(output_token_logprobs=entries)).rollout_logprobs.tolist() == [1e-7, 0.0, -103.5]


def test_weights_that_change_within_a_response_are_refused() -> None:
    spans = [{"version": "v6", "start": 0, "end": 2}, {"version": "v7", "start": 2, "end": 3}]
    with pytest.raises(RecordError, match="request a1, meta_info.weight_versions: .*one version"):
        parse(response(weight_versions=spans))
    assert parse(response(weight_versions=spans[1:])).response_ids.tolist() == [21, 22, 23]


def test_another_version_of_the_weights_than_expected_is_refused() -> None:
    assert parse(response(), weight_version="v7").response_ids.tolist() == [21, 22, 23]
    for output in (response(), response(drop="weight_version")):
        with pytest.raises(RecordError, match="meta_info.weight_version: found .*; allowed: 'v8', the stamp"):
            parse(output, weight_version="v8")


def test_missing_routes_name_the_flag_of_the_server() -> None:
    with pytest.raises(
        RoutingError, match="request a1, meta_info.routed_experts: missing.*--enable-return-routed-expe"
    ):
        parse(response(drop="routed_experts"))
