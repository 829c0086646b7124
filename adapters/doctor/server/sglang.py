"""A stock SGLang server as the doctor's engine, over its own `POST /generate`.

Its OpenAI routes are not used, because they take text or add the checkpoint's sampling defaults, and send the expert routes of
only one choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.server.detect import Server
from mismatch_ext.adapters.doctor.server.engine import ServedEngine
from mismatch_ext.adapters.http import brief
from mismatch_ext.adapters.sglang.doctor import sampled, scored
from mismatch_ext.adapters.sglang.server import read_server

from mismatch_ext.doctor import Sample
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.routing import RoutingShape

PATH = "/generate"


class SglangServer(ServedEngine):
    """A stock SGLang server."""

    def __init__(self, server: Server, shape: RoutingShape | None = None) -> None:
        super().__init__(server, shape)
        self._reading = read_server(server.info)
        # SGLang silently sends no routes if it does not record them.
        self._recorded = shape if server.info.get("enable_return_routed_experts") is True else None

    def sample(self, asked: ToSample) -> Sample:
        """Sample with one request per response, several at once."""
        self._ensure_known([*asked.prompts, *(asked.seen or ())])
        return sampled(lambda request: self._generated(request, "sampling"), self._reading, asked, self._recorded)

    def score(self, sample: Sample) -> Sample:
        """Score with one request per response, several at once."""
        return scored(lambda request: self._generated(request, "scoring"), sample, self._recorded)

    def _ensure_known(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse tokens that the server's model does not have; SGLang does not check prompts, and its scheduler would end."""
        # SGLang does check the tokens of a logit_bias, and a bias of 0 changes nothing.
        settings = {"max_new_tokens": 1, "logit_bias": {str(max(map(max, prompts))): 0.0}}
        self._one({"input_ids": [min(map(min, prompts))], "sampling_params": settings})

    def _generated(self, request: dict[str, Any], name: str) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.server.client.each(self._one, alone(request), name)
        return answers

    def _one(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.server.adapter:
            body = {**body, "lora_path": self.server.name}
        try:
            answer = self.server.client.post(PATH, body)
        except ConfigError as error:
            raise ConfigError(f"{error}{advice(str(error))}") from error
        if not isinstance(answer, dict):
            raise RecordError(f"--server: {PATH} answered {brief(answer)}; allowed: one response.")
        return answer


def alone(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a request for several prompts into one request per prompt.

    Args:
        request: A request that `generate_request` built for several prompts.
    """
    prompts, settings = request["input_ids"], request["sampling_params"]
    each = settings if isinstance(settings, list) else [settings] * len(prompts)
    return [
        {**request, "input_ids": prompt, "sampling_params": setting}
        for prompt, setting in zip(prompts, each, strict=True)
    ]


def advice(refusal: str) -> str:
    """Return what to do about a request that SGLang refused."""
    if "logit_bias must has keys" in refusal:
        return (
            "; the server's model has a smaller vocabulary than --prompts or a logit_bias: is it the model of --model?"
        )
    if "context length" in refusal or "maximum allowed length" in refusal:
        return "; give a smaller --max-tokens, or shorter prompts"
    return "; --sampling takes SGLang's own names and values, and the server's log says more"
