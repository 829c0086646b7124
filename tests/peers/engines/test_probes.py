"""Requests for this package's own purposes, as vLLM's runner for GPUs takes them: they move no random number of others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

IDS = [[3, 5, 7, 9], [2, 4, 6, 8]]


class Asked(BaseException):
    """A request has arrived; its answer is of no interest here."""


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], bool]:
    """Return a function that tells whether vLLM draws from NumPy's global generator when it takes a request."""
    from vllm.v1.worker.gpu.sample import states

    def on_cpu(size: int, dtype: torch.dtype) -> Any:
        # vLLM's own tensor has a copy on the GPU.
        return SimpleNamespace(np=torch.zeros(size, dtype=dtype).numpy(), copy_to_uva=lambda: None)

    monkeypatch.setattr(states, "UvaBackedTensor", on_cpu)

    def draws(params: Any) -> bool:
        before = np.random.get_state()[1:3]
        states.SamplingStates(max_num_reqs=4, vocab_size=100).add_request(0, params)
        after = np.random.get_state()[1:3]
        return not all(map(np.array_equal, before, after))

    return draws


def sent_to_engine(ask: Callable[[Any], Any]) -> list[Any]:
    """Return the sampling parameters of what is sent to an engine in this process."""
    asked: list[Any] = []

    def generate(prompts: Any, params: Any, **_: Any) -> Any:
        asked.extend(params if isinstance(params, list) else [params])
        raise Asked

    with pytest.raises(Asked):
        ask(SimpleNamespace(generate=generate))
    return asked


def sent_to_server(ask: Callable[[Any], Any]) -> list[Any]:
    """Return the sampling parameters that vLLM's server makes of what is sent to it."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    bodies: list[dict[str, Any]] = []

    def post(path: str, body: dict[str, Any], timeout: float | None = None) -> Any:
        bodies.append(body)
        raise Asked

    with pytest.raises(Asked):
        ask(post)
    return [CompletionRequest(**body).to_sampling_params(body["max_tokens"]) for body in bodies]


def sent_to_verl(ask: Callable[[Any], Any]) -> list[Any]:
    """Return the sampling parameters of what is sent to a vLLM server of verl's."""
    from vllm import SamplingParams

    asked: list[Any] = []
    generate = SimpleNamespace(remote=lambda *, sampling_params, **_: asked.append(sampling_params))
    ask(SimpleNamespace(servers=[SimpleNamespace(generate=generate)], config=SimpleNamespace(name="vllm")))
    # verl replaces `logprobs` by vLLM's number.
    return [SamplingParams(**{name: value for name, value in one.items() if name != "logprobs"}) for one in asked]


def in_process(name: str) -> list[Any]:
    from mismatch_ext.adapters.vllm.probes import decode_tokens, score_tokens

    if name == "decode":
        return sent_to_engine(lambda llm: decode_tokens(llm, IDS, 3))
    return sent_to_engine(lambda llm: score_tokens(llm, IDS))


def remote(name: str) -> list[Any]:
    from mismatch_ext.adapters.vllm.remote import RemoteEngine

    def ask(post: Any) -> Any:
        engine = object.__new__(RemoteEngine)
        engine.http, engine.model = SimpleNamespace(post=post), "served"  # type: ignore[assignment]
        engine.config = {"device_config": {"device": "cuda"}}
        return engine.decode(torch.tensor(IDS), 3) if name == "decode" else engine.score(torch.tensor(IDS))

    return sent_to_server(ask)


def verl(name: str) -> list[Any]:
    from mismatch_ext.adapters.verl.driver import servers

    if name == "decode":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(servers, "on_cpu_build", lambda: False)
            return sent_to_verl(lambda replica: servers.ask_decode(replica, IDS, 3))
    return sent_to_verl(lambda replica: servers.ask_probes(replica, IDS))


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (in_process, "score"), (in_process, "decode"), (remote, "score"), (remote, "decode"), (verl, "score"), (verl, "decode"),
    ],
)  # fmt: skip
def test_probes_draw_no_random_number_that_seeds_other_requests(
    draws: Callable[[Any], bool], sent: Callable[[str], list[Any]], name: str
) -> None:
    params = sent(name)
    assert params
    assert [one for one in params if draws(one)] == []


def test_a_request_without_a_seed_does(draws: Callable[[Any], bool]) -> None:
    from vllm import SamplingParams

    assert draws(SamplingParams(temperature=0.0)) and draws(SamplingParams(temperature=1.0))
