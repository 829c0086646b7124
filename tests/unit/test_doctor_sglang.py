"""What the doctor asks of SGLang, and how it reads the answers; tests/peers/test_doctor_sglang.py asks a real one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.sglang.doctor import SglangEngine

from mismatch_ext.precision.audit import EngineReading

PROMPTS = [[3, 4, 5], [6, 7]]


class Answering:
    """A transport that answers as SGLang 0.5.18 does, each token by its id's own log-probability."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []

    def generate(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.asked.append(request)
        return [self._answer(ids, "logprob_start_len" in request) for ids in request["input_ids"]]

    def _answer(self, ids: list[int], scores: bool) -> dict[str, Any]:
        # The response is the prompt's last token and the end.
        output = [] if scores else [ids[-1], 1]
        meta: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(output),
            "finish_reason": {"type": "stop", "matched": 1},
            "output_token_logprobs": [(-float(token), token, None) for token in output],
        }
        if scores:
            # A prompt's are further down, to be told from a response's.
            meta["input_token_logprobs"] = [(None, ids[0], None), *((-10.0 - token, token, None) for token in ids[1:])]
        return {"output_ids": output, "meta_info": meta}


def engine() -> tuple[SglangEngine, Answering]:
    made, transport = SglangEngine.__new__(SglangEngine), Answering()
    made._transport = transport  # type: ignore[assignment]
    made._shape = None
    made.reading = EngineReading(
        engine="sglang", version="0.5.18", model_dtype="bfloat16", parameter_dtypes={}, kv_cache_dtype="auto",
        logprobs_mode="processed_logprobs", quantization=None,
    )  # fmt: skip
    return made, transport


def test_every_response_has_noise_of_its_own_and_settings_that_are_left_out_are_the_engines() -> None:
    made, transport = engine()
    sampling = {"sampling_seed": 5, "frequency_penalty": 0.5}
    sample = made.sample(ToSample(prompts=PROMPTS, responses=5, max_tokens=9, sampling=sampling))
    assert sample.prompts == ((3, 4, 5),) * 3 + ((6, 7),) * 3 and sample.responses == ((5, 1),) * 3 + ((7, 1),) * 3
    (request,) = transport.asked
    settings = request["sampling_params"]
    assert [one["sampling_seed"] for one in settings] == [5, 6, 7, 8, 9, 10]
    # As the run's requests, which preferred_sampling_params fill in.
    assert {(one["n"], one["frequency_penalty"], one["max_new_tokens"]) for one in settings} == {(1, 0.5, 9)}
    assert not any("top_p" in one or "temperature" in one for one in settings)
    assert sampling == {"sampling_seed": 5, "frequency_penalty": 0.5}


def test_the_engine_sees_other_prompts_and_the_sample_has_the_trainers() -> None:
    made, transport = engine()
    sample = made.sample(ToSample(prompts=PROMPTS, responses=2, max_tokens=9, sampling={}, seen=[[9, 3], [9, 6]]))
    assert transport.asked[0]["input_ids"] == [[9, 3], [9, 6]]
    assert sample.prompts == ((3, 4, 5), (6, 7)) and sample.responses == ((3, 1), (6, 1))


def test_a_response_is_scored_as_the_end_of_a_prompt() -> None:
    made, transport = engine()
    sample = made.sample(ToSample(prompts=PROMPTS, responses=2, max_tokens=9, sampling={"temperature": 0.5}))
    assert sample.logprobs == ((-5.0, -1.0), (-7.0, -1.0))
    again = made.score(sample)
    assert again.logprobs == ((-15.0, -11.0), (-17.0, -11.0)) and again.responses == sample.responses
    asked = transport.asked[1]
    assert asked["input_ids"] == [[3, 4, 5, 5, 1], [6, 7, 7, 1]]
    assert asked["sampling_params"]["max_new_tokens"] == 0 and asked["sampling_params"]["temperature"] == 1.0
