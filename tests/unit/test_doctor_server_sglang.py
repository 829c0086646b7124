"""The doctor against SGLang servers: recorded answers of a real one, and what it must not be sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.server import Address, connect, engine_of

from mismatch_ext.doctor import Sample
from mismatch_ext.errors import ConfigError, RoutingError
from tests.unit.test_doctor_server import DATA, SHAPE, Answers, listening

RECORDED = json.loads((DATA / "sglang_0.5.18.json").read_text(encoding="utf-8"))
NAME = RECORDED["models"]["data"][0]["id"]


def answering(**info: Any) -> Answers:
    """Return a server's answers: what it sampled, or scored, was recorded; tokens beyond the vocabulary end it."""

    def generate(body: Any) -> tuple[int, Any]:
        settings = body["sampling_params"]
        if any(int(token) > 15 for token in settings.get("logit_bias") or ()):
            return 400, RECORDED["vocab"]
        assert max(body["input_ids"]) <= 15, "SGLang's scheduler ends"
        return 200, RECORDED["score" if settings["max_new_tokens"] == 0 else "sample"]

    return {
        "/v1/models": (200, RECORDED["models"]),
        "/server_info": (200, RECORDED["info"] | info),
        "/generate": generate,
    }


def bodies(seen: list[Any]) -> list[Any]:
    """Return the requests that sampled or scored."""
    return [body for path, body, _ in seen if path == "/generate" and "return_logprob" in body]


def test_what_a_server_says_of_itself_is_read() -> None:
    with listening(answering(kv_cache_dtype="fp8_e5m2")) as (url, _):
        found = connect(Address(url=f"{url}/v1/"))
    assert (found.kind, found.version, found.name, found.serves) == ("sglang", "0.5.18", NAME, NAME)
    # Less than its context: what fits into a request of its cache.
    assert (found.dtype, found.longest, found.adapter) == ("bfloat16", 250, False)
    assert found.notes(NAME) == ("the server is SGLang 0.5.18, with kv_cache_dtype fp8_e5m2",)


def test_sampled_tokens_come_with_their_logprobs_and_routes_each_with_a_seed_of_its_own() -> None:
    with listening(answering()) as (url, seen):
        sample = engine_of(connect(Address(url=url)), SHAPE).sample(
            ToSample(prompts=[(3, 4, 5, 6)] * 2, responses=3, max_tokens=5, sampling={"sampling_seed": 7, "top_p": 0.9})
        )
    asked = bodies(seen)
    assert sorted(body["sampling_params"]["sampling_seed"] for body in asked) == [7, 8, 9, 10]
    # What the run's requests leave out, the server fills in.
    assert not any("min_p" in body["sampling_params"] for body in asked)
    assert sample.responses[0] == (12, 12, 4, 12, 6) and sample.logprobs[0][2] == -5.086203575134277
    assert sample.routes is not None and [trace.rows for trace in sample.routes] == [8] * 4


def scoring() -> Sample:
    return Sample(
        prompts=((7, 8, 9),) * 2, responses=((3, 4),) * 2, masks=((True, True),) * 2, logprobs=((0.0, 0.0),) * 2
    )


def test_scored_tokens_are_those_of_the_response() -> None:
    with listening(answering()) as (url, seen):
        again = engine_of(connect(Address(url=url)), SHAPE).score(scoring())
    assert again.logprobs == ((-4.017690658569336, -3.611652374267578),) * 2
    assert again.routes is not None and [trace.rows for trace in again.routes] == [4, 4]
    assert all(body["sampling_params"]["temperature"] == 1.0 for body in bodies(seen))
    assert all(body["logprob_start_len"] == 0 for body in bodies(seen))


def test_routes_that_were_promised_and_are_missing_are_an_error() -> None:
    bare = {"meta_info": {**RECORDED["score"]["meta_info"], "routed_experts": None}}
    answers = answering() | {"/generate": (200, RECORDED["score"] | bare)}
    with listening(answers) as (url, _), pytest.raises(RoutingError):
        engine_of(connect(Address(url=url)), SHAPE).score(scoring())


def test_tokens_that_its_model_does_not_have_are_not_sent() -> None:
    with listening(answering()) as (url, seen), pytest.raises(ConfigError, match="smaller vocabulary than --prompts"):
        engine_of(connect(Address(url=url)), None).sample(
            ToSample(prompts=[(3, 99)] * 2, responses=2, max_tokens=5, sampling={})
        )
    assert not bodies(seen)


def test_what_it_would_refuse_is_refused_before() -> None:
    with listening(answering()) as (url, _):
        server = connect(Address(url=url))
    server.ensure_fits([[1] * 100], 149, {"min_new_tokens": 3, "sampling_seed": 0})
    with pytest.raises(ConfigError, match="one token more than the 250 that the server allows"):
        server.ensure_fits([[1] * 100], 150, {})


def test_an_adapter_is_asked_by_its_name() -> None:
    (base,) = RECORDED["models"]["data"]
    adapter = {"id": "lora", "root": "/adapters/lora", "parent": base["id"], "max_model_len": None}
    answers = answering() | {"/v1/models": (200, {"data": [base, adapter]})}
    with listening(answers) as (url, seen):
        found = connect(Address(url=url, model="lora"))
        engine_of(found, None).score(scoring())
    assert found.serves == "/adapters/lora" and {body["lora_path"] for body in bodies(seen)} == {"lora"}


def test_a_refusal_says_what_to_do() -> None:
    answers = answering() | {"/generate": (400, RECORDED["toolong"])}
    with listening(answers) as (url, _), pytest.raises(ConfigError, match="smaller --max-tokens"):
        engine_of(connect(Address(url=url)), None).score(scoring())
