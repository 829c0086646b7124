"""One dict is the body of a request and the arguments of the engine, in every version; what would not compare is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mismatch_ext.adapters.sglang import generate_request

from mismatch_ext.errors import RecordError
from mismatch_ext.rollout import SamplingSettings
from tests.unit.sglang_recorded import FOLDER

FIELDS: dict[str, dict[str, list[str]]] = json.loads((FOLDER / "fields.json").read_text(encoding="utf-8"))
EVERYTHING: dict[str, Any] = {
    "max_new_tokens": 6,
    "routing": True,
    "prompt_logprobs": True,
    "stop_token_ids": (7, 8),
    "n": 2,
}


def test_the_plain_request() -> None:
    request = generate_request([3, 4], SamplingSettings(temperature=0.5, top_p=0.9), max_new_tokens=6)
    assert request["input_ids"] == [3, 4] and request["return_logprob"] is True
    sent = request["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["max_new_tokens"]) == (0.5, 0.9, -1, 6)


def test_everything_that_can_be_asked_for() -> None:
    request = generate_request([3, 4, 5], SamplingSettings(top_k=20), **EVERYTHING)
    assert request["logprob_start_len"] == 0 and request["return_routed_experts"] is True
    sent = request["sampling_params"]
    assert (sent["stop_token_ids"], sent["top_k"], sent["n"]) == ([7, 8], 20, 2)


@pytest.mark.parametrize("version", FIELDS)
def test_every_key_is_one_of_the_engine_and_of_the_server(version: str) -> None:
    request = generate_request([[3, 4, 5]], SamplingSettings(), **EVERYTHING)
    assert set(request) <= set(FIELDS[version]["Engine.generate"])
    assert set(request) <= set(FIELDS[version]["GenerateReqInput"])
    assert set(request["sampling_params"]) <= set(FIELDS[version]["SamplingParams"])


@pytest.mark.parametrize("version", ["0.5.12", "0.5.18", "0.5.23"])
def test_every_setting_of_the_sampling_is_sent(version: str) -> None:
    sent = set(generate_request([3], SamplingSettings(), max_new_tokens=1)["sampling_params"])
    # What shapes text, what normalization fills in, and what 0.5.18 would refuse as unknown.
    text = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}
    inner = {"is_normalized", "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"}
    newer = {"beam_width", "ebnf_full_assistant", "watermark"}
    assert set(FIELDS[version]["SamplingParams"]) - sent <= text | inner | newer


def test_greedy_sampling_is_asked_for_at_temperature_1() -> None:
    request = generate_request([3], SamplingSettings(top_k=1), max_new_tokens=1)
    assert (request["sampling_params"]["top_k"], request["sampling_params"]["temperature"]) == (1, 1.0)


@pytest.mark.parametrize(
    ("sampling", "options", "message"),
    [
        ({"temperature": 1e-7}, {}, "temperature=1e-07: SGLang samples greedily below 1e-06"),
        ({"top_k": 1, "temperature": 0.5}, {}, "top_k=1 with temperature=0.5"),
        ({}, {"stop_token_ids": [2], "ignore_eos": True}, r"ignore_eos=True with stop_token_ids=\[2\]"),
    ],
)
def test_what_sglang_would_understand_otherwise_is_refused(
    sampling: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        generate_request([1, 2, 3], SamplingSettings(**sampling), max_new_tokens=4, **options)
