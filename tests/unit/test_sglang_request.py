"""One dict is the body of a request and the arguments of the engine, in every version; what would not compare is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mismatch_ext.adapters.sglang import generate_request

from mismatch_ext.errors import MismatchError, PeerVersionError, RecordError, RoutingError
from mismatch_ext.records import SamplingSettings
from tests.unit.sglang_recorded import FOLDER

FIELDS: dict[str, dict[str, list[str]]] = json.loads((FOLDER / "fields.json").read_text(encoding="utf-8"))
EVERYTHING: dict[str, Any] = {
    "max_new_tokens": 6,
    "routing": True,
    "routed_experts_start": 2,
    "prompt_logprobs": True,
    "stop_token_ids": (7, 8),
    "n": 2,
    "stream": True,
    "request_ids": "a",
}


def test_the_plain_request() -> None:
    assert generate_request([3, 4], SamplingSettings(temperature=0.5, top_p=0.9), max_new_tokens=6) == {
        "input_ids": [3, 4],
        "sampling_params": {
            "max_new_tokens": 6,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": False,
            "n": 1,
            # Without effect, so that no preferred setting of the server takes their place.
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "min_new_tokens": 0,
            "stop": None,
            "stop_regex": None,
            "stop_token_ids": [],
            "json_schema": None,
            "regex": None,
            "ebnf": None,
            "structural_tag": None,
            "logit_bias": None,
            "custom_params": None,
            "sampling_seed": None,
        },
        "return_logprob": True,
    }


def test_everything_that_can_be_asked_for() -> None:
    request = generate_request([3, 4, 5], SamplingSettings(top_k=20), **EVERYTHING)
    assert request["logprob_start_len"] == 0 and request["stream"] is True and request["rid"] == "a"
    assert request["return_routed_experts"] is True and request["routed_experts_start_len"] == 2
    settings = request["sampling_params"]
    assert settings["stop_token_ids"] == [7, 8] and settings["top_k"] == 20
    assert settings["n"] == 2
    assert (
        generate_request([3], SamplingSettings(), max_new_tokens=1, ignore_eos=True)["sampling_params"]["ignore_eos"]
        is True
    )


@pytest.mark.parametrize("version", FIELDS)
def test_every_key_is_one_of_the_engine_and_of_the_server(version: str) -> None:
    request = generate_request([[3, 4, 5]], SamplingSettings(), **EVERYTHING | {"request_ids": ["a"]})
    assert len(request) == 8
    assert set(request) <= set(FIELDS[version]["Engine.generate"])
    assert set(request) <= set(FIELDS[version]["GenerateReqInput"])
    assert set(request["sampling_params"]) <= set(FIELDS[version]["SamplingParams"])


@pytest.mark.parametrize("version", ["0.5.12", "0.5.18", "0.5.23"])
def test_every_setting_of_the_sampling_is_sent(version: str) -> None:
    sent = set(generate_request([3], SamplingSettings(), max_new_tokens=1)["sampling_params"])
    # What shapes text, what normalisation fills in, and what 0.5.18 would refuse as unknown.
    text = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}
    inner = {"is_normalized", "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"}
    newer = {"beam_width", "ebnf_full_assistant", "watermark"}
    assert set(FIELDS[version]["SamplingParams"]) - sent <= text | inner | newer


def test_one_seed_or_one_per_prompt() -> None:
    def settings(ids: Any, seed: Any) -> Any:
        return generate_request(ids, SamplingSettings(), max_new_tokens=1, seed=seed)["sampling_params"]

    assert settings([3], 5)["sampling_seed"] == settings([3], [5])["sampling_seed"] == 5
    assert settings([[3], [4]], 5)["sampling_seed"] == 5
    # A prompt once per sample.
    found = settings([[3], [3], [4]], [1, 2, 1])
    assert [one["sampling_seed"] for one in found] == [1, 2, 1]
    assert all(one | {"sampling_seed": None} == settings([3], None) for one in found)


def test_a_batch_stays_a_batch_and_its_names_too() -> None:
    request = generate_request([[3, 4], (5,)], SamplingSettings(), max_new_tokens=1, request_ids=["a", "b"])
    assert request["input_ids"] == [[3, 4], [5]] and request["rid"] == ["a", "b"]
    assert generate_request([[3, 4]], SamplingSettings(), max_new_tokens=1)["input_ids"] == [[3, 4]]


@pytest.mark.parametrize("top_k", [0, -1])
def test_both_spellings_of_the_whole_vocabulary_are_sglangs(top_k: int) -> None:
    request = generate_request([3], SamplingSettings(top_k=top_k), max_new_tokens=1)
    assert request["sampling_params"]["top_k"] == -1


def test_greedy_sampling_is_asked_for_at_temperature_1() -> None:
    request = generate_request([3], SamplingSettings(top_k=1), max_new_tokens=1)
    assert (request["sampling_params"]["top_k"], request["sampling_params"]["temperature"]) == (1, 1.0)


# Arguments, the class of the error, and what its message must name.
REFUSED: list[tuple[dict[str, Any], type[MismatchError], str]] = [
    ({"input_ids": []}, RecordError, r"input_ids is \[\]"),
    ({"input_ids": "text"}, RecordError, "input_ids is 'text'"),
    ({"input_ids": ["text"]}, RecordError, r"input_ids\[0\] is 'text'; .*not text"),
    ({"input_ids": [[1], []]}, RecordError, r"input_ids\[1\] is \[\]"),
    ({"input_ids": [1, 2.0]}, RecordError, r"input_ids\[0\]\[1\]: found 2.0"),
    ({"input_ids": [[1], [2**31]]}, RecordError, r"input_ids\[1\]\[0\]: found 2147483648"),
    ({"input_ids": [True]}, RecordError, r"input_ids\[0\] is True"),
    ({"max_new_tokens": -1}, RecordError, "max_new_tokens=-1; allowed: an integer >= 0"),
    ({"max_new_tokens": 1.5}, RecordError, "max_new_tokens=1.5"),
    ({"n": 0}, RecordError, "n=0; allowed: an integer >= 1"),
    ({"seed": 2**63}, RecordError, "seed=9223372036854775808; allowed: an integer of 64 bits"),
    ({"seed": 1.0}, RecordError, "seed=1.0"),
    ({"seed": [1, 2]}, RecordError, "2 seeds for 1 prompts; allowed: one seed, or one per prompt"),
    ({"seed": 7, "n": 2}, RecordError, r"n=2 with seed=7: SGLang draws the same for all 2 .* seed=\[1, 2\]"),
    ({"input_ids": [[1], [2]], "seed": [7, 8], "n": 2}, RecordError, r"n=2 with seed=\[7, 8\]"),
    ({"input_ids": [[1], [1]], "seed": 7}, RecordError, "the same prompt twice with one seed"),
    ({"input_ids": [[1], [2], [1]], "seed": [7, 7, 7]}, RecordError, "the same prompt twice with one seed"),
    ({"stop_token_ids": [2], "ignore_eos": True}, RecordError, r"ignore_eos=True with stop_token_ids=\[2\]"),
    ({"stop_token_ids": [-2]}, RecordError, r"stop_token_ids\[0\]: found -2"),
    ({"request_ids": ["a", "b"]}, RecordError, r"request_ids=\['a', 'b'\] for 1 prompts"),
    ({"input_ids": [[1], [2]], "request_ids": ["a", "a"]}, RecordError, "all different"),
    ({"prompt_logprobs": True, "logprobs": False}, RecordError, "prompt_logprobs=True with logprobs=False"),
    ({"prompt_logprobs": True, "sampling": {"temperature": 0.5}}, RecordError, "temperature=0.5: .*at temperature 1"),
    ({"sampling": {"temperature": 1e-7}}, RecordError, "temperature=1e-07: SGLang samples greedily below 1e-06"),
    ({"sampling": {"top_k": 1, "temperature": 0.5}}, RecordError, "top_k=1 with temperature=0.5"),
    ({"sampling": {"repetition_penalty": 2.5}}, RecordError, "repetition_penalty=2.5 .*0 < x <= 2"),
    ({"routing": True, "routed_experts_start": 4}, RoutingError, "routed_experts_start=4; allowed: 0 to 3"),
    ({"routing": True, "routed_experts_start": -1}, RoutingError, "routed_experts_start=-1"),
    ({"routing": True, "routed_experts_start": 1.0}, RoutingError, "routed_experts_start=1.0"),
    ({"input_ids": [[1, 2], [3]], "routing": True, "routed_experts_start": 2}, RoutingError, "allowed: 0 to 1"),
    ({"routed_experts_start": 2}, RoutingError, "routed_experts_start=2 with routing=False has no effect"),
    ({"routing": True, "routed_experts_start": 2, "version": "0.5.9"}, PeerVersionError, "sglang 0.5.9 ignores"),
    ({"routing": True, "routed_experts_start": 2, "version": "main"}, PeerVersionError, "version 'main' is no version"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_what_does_not_compare_or_is_refused_later_is_refused_now(
    change: dict[str, Any], kind: type[MismatchError], message: str
) -> None:
    arguments = {"input_ids": [1, 2, 3], "max_new_tokens": 4} | change
    sampling = SamplingSettings(**arguments.pop("sampling", {}))
    with pytest.raises(kind, match=message):
        generate_request(arguments.pop("input_ids"), sampling, **arguments)


@pytest.mark.parametrize("version", ["0.5.12", "0.5.18", "0.5.23+cpu", None])
def test_a_start_is_sent_where_it_is_honoured(version: str | None) -> None:
    request = generate_request(
        [1, 2, 3], SamplingSettings(), max_new_tokens=1, routing=True, routed_experts_start=3, version=version
    )
    assert request["routed_experts_start_len"] == 3


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_a_request_travels_as_json_unchanged(prompts: list[list[int]], single: bool) -> None:
    request = generate_request(prompts[0] if single else prompts, SamplingSettings(), max_new_tokens=2, routing=True)
    assert json.loads(json.dumps(request)) == request
    assert request["input_ids"] == (prompts[0] if single else prompts)
    assert request["input_ids"] is not prompts
