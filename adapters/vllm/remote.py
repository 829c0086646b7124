"""A vLLM server as the rollout side of a trainer: dtypes, log-probabilities and weights read back over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from mismatch_ext.adapters.http import Refused
from mismatch_ext.adapters.vllm.http import ALIVE, COMPLETIONS, ServerHttp
from mismatch_ext.adapters.vllm.routing import FLAG
from mismatch_ext.adapters.vllm.server.plugin import BACKEND
from mismatch_ext.adapters.vllm.server.readback import DIGESTS, READ
from mismatch_ext.adapters.vllm.weights import SentTensor, digest_of_rows
from torch import Tensor

from mismatch_ext.errors import EngineError, NonFiniteLogprobError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.weights import Decoded, TensorComparison, in_parts

REQUEST_BYTES = 1 << 26
"""Most bytes of weights in one request, before base64; a larger tensor has a request of its own."""

# Every setting is given, because a server takes those that a request leaves out from the model's generation_config.json.
NEUTRAL = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "seed": 0, "ignore_eos": True,
}  # fmt: skip
"""Settings that sample from the model's own distribution, with the same random numbers each time, beyond the end of a text."""

FIRST = -(1 << 20)
"""Priority of probes, where the server orders requests by it: the lowest number comes first, and other requests have 0."""

PREFILL = {"max_tokens": 1, "temperature": 0.0, "seed": 0, "prompt_logprobs": 0}
"""Settings that score a prompt. The seed keeps vLLM from drawing one out of the numbers that seed other requests."""


class RemoteEngine:
    """A `vllm serve` with its development endpoints.

    If this package is installed where the server runs, the server's workers are read back. Otherwise dtypes are taken from the
    server's configuration, and no tensor is compared.

    Args:
        http: The server.

    Attributes:
        config: vLLM's resolved configuration, as the server reports it.
        version: The version of the server's vLLM.
        model: The name that requests give for the model.
        plugin: The version of this package in the server; None if it does not run there.

    Raises:
        EngineError: The server cannot be reached, or lacks a development endpoint that is needed; says how to start it.
    """

    def __init__(self, http: ServerHttp) -> None:
        self.http = http
        try:
            self.config: dict[str, Any] = http.get("/server_info", config_format="json")["vllm_config"]
        except Refused as error:
            if error.status != 404:
                raise
            if self._is_in_development_mode():
                raise self._without("/server_info") from error
            raise EngineError(
                f"the vLLM server at {http.url} has no development endpoints, over which weights are sent and read back; restart "
                "it with VLLM_SERVER_DEV_MODE=1 in its environment."
            ) from error
        self.version = str(http.get("/version")["version"])
        self.model = str(http.get("/v1/models")["data"][0]["id"])
        self.plugin = self._plugin()

    def _plugin(self) -> str | None:
        try:
            return str(self.http.rpc(READ)[0]["mismatch"])
        except Refused as error:
            # The words for a missing method differ between versions of vLLM, but they contain its name.
            if READ in error.reply:
                return None
            if error.status == 404:
                raise self._without("/collective_rpc") from error
            raise

    def _is_in_development_mode(self) -> bool:
        """Tell whether the server has a development endpoint that only reads."""
        for path in (ALIVE, "/is_sleeping"):
            try:
                self.http.get(path)
            except Refused:
                continue
            return True
        return False

    def _without(self, path: str) -> EngineError:
        """Return the error for a frontend that has development endpoints, but not this one."""
        return EngineError(
            f"the vLLM server at {self.http.url} cannot be read back, because its HTTP frontend has no {path}. Restart it with "
            "vLLM's Python frontend, which has it: VLLM_USE_RUST_FRONTEND=0 and VLLM_SERVER_DEV_MODE=1 in its environment."
        )

    @property
    def on_cpu(self) -> bool:
        """Whether the server computes on a CPU."""
        return str(self.config["device_config"]["device"]).startswith("cpu")

    @property
    def backend(self) -> str | None:
        """vLLM's name of the backend by which weights reach the server; None if it takes no weights."""
        transfer = self.config.get("weight_transfer_config")
        return None if transfer is None else str(transfer["backend"])

    @property
    def longest(self) -> int:
        """Largest number of tokens of a sequence that can be scored."""
        return int(self.config["model_config"]["max_model_len"]) - 1

    @property
    def most_logprobs(self) -> int | None:
        """Largest number of log-probabilities that a request may ask for at each token; None without a limit."""
        most = int(self.config["model_config"]["max_logprobs"])
        return None if most < 0 else most

    @property
    def records_routing(self) -> bool:
        """Whether the server returns the experts that tokens were routed to."""
        holders = (self.config["model_config"], self.config.get("aux_output_config") or {})
        return any(bool(holder.get(FLAG)) for holder in holders)

    def reading(self) -> EngineReading:
        """Return what the server computes with: read from all its workers, or taken from its configuration without the plugin.

        Raises:
            EngineError: The workers differ in a dtype or a mode.
        """
        if self.plugin is None:
            model = self.config["model_config"]
            cache = self.config["cache_config"]
            return EngineReading(
                engine="vllm",
                version=self.version,
                model_dtype=str(model["dtype"]).removeprefix("torch."),
                parameter_dtypes={},
                kv_cache_dtype=str(cache["cache_dtype"]),
                logprobs_mode=str(model["logprobs_mode"]),
                quantization=model["quantization"],
            )
        first, *others = self.http.rpc(READ)
        counts: dict[str, int] = dict(first["parameter_dtypes"])
        for worker in others:
            for key in ("model_dtype", "head_dtype", "kv_cache_dtype", "logprobs_mode", "quantization"):
                if worker[key] != first[key]:
                    raise EngineError(
                        f"the workers of the vLLM server at {self.http.url} differ in {key}: {first[key]!r} and {worker[key]!r}; "
                        "restart it."
                    )
            for dtype, count in worker["parameter_dtypes"].items():
                counts[dtype] = counts.get(dtype, 0) + count
        fields = {name: value for name, value in first.items() if name != "mismatch"}
        return EngineReading(**fields | {"parameter_dtypes": counts})

    @property
    def urgency(self) -> dict[str, int]:
        """What lets a request be answered before others; nothing where the server answers in their order."""
        scheduler = self.config.get("scheduler_config") or {}
        return {"priority": FIRST} if scheduler.get("policy") == "priority" else {}

    def score(self, tokens: Tensor, *, timeout: float | None = None) -> Tensor:
        """Return prefill's log-probabilities `[N, T-1]`, float64, of tokens `[N, T]` after the first.

        All are NaN if the server says that one of them is not finite. `timeout` is in seconds; None is the client's own.
        """
        rows = tokens.tolist()
        body = {"model": self.model, "prompt": rows, **PREFILL, **self.urgency}
        try:
            choices = self._choices(body, timeout)
        except NonFiniteLogprobError:
            # vLLM does not say which tokens have them.
            return torch.full((len(rows), len(rows[0]) - 1), torch.nan, dtype=torch.float64)
        logprobs = [
            [entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], row[1:], strict=True)]
            for choice, row in zip(choices, rows, strict=True)
        ]
        return torch.tensor(logprobs, dtype=torch.float64)

    def _choices(self, body: Mapping[str, Any], timeout: float | None) -> list[dict[str, Any]]:
        """Return the server's completions in the order of their prompts."""
        answer = self.http.post(COMPLETIONS, body, timeout=timeout)
        return sorted(answer["choices"], key=lambda choice: int(choice["index"]))

    def decode(self, tokens: Tensor, count: int, *, timeout: float | None = None) -> Decoded:
        """Sample `count` tokens after each prompt of `[N, P]`; all log-probabilities are NaN if one of them is not finite.

        `timeout` is as for `score`. Sampling has a seed. On a CPU the likeliest tokens are taken instead, because its sampler
        draws from the random numbers of all requests even if there is a seed.
        """
        rows = tokens.tolist()
        body = {
            "model": self.model,
            "prompt": rows,
            "max_tokens": count,
            "logprobs": 0,
            "return_token_ids": True,
            **NEUTRAL,
            **self.urgency,
            "temperature": 0.0 if self.on_cpu else 1.0,
        }
        try:
            choices = self._choices(body, timeout)
        except NonFiniteLogprobError:
            nothing = torch.full((len(rows), count), torch.nan, dtype=torch.float64)
            return Decoded(
                tokens=torch.cat([tokens.cpu(), torch.zeros_like(nothing, dtype=torch.int64)], 1), logprobs=nothing
            )
        sampled = torch.tensor([choice["token_ids"] for choice in choices])
        logprobs = torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices], dtype=torch.float64)
        return Decoded(tokens=torch.cat([tokens.cpu(), sampled], 1), logprobs=logprobs)

    def compare(
        self, sent: Mapping[str, SentTensor], before: Mapping[str, SentTensor], *, timeout: float | None = None
    ) -> Sequence[TensorComparison]:
        """Compare embeddings and norms of every worker with what was sent, by digests after rounding to the worker's dtype.

        An embedding of which a worker holds only a part is not compared there; the probe tokens check it.

        Args:
            sent: By checkpoint name, what the last weight update sent.
            before: By checkpoint name, what the update before sent.
            timeout: As for `score`.

        Returns:
            One comparison for each tensor that a worker holds whole; none if this package does not run in the server.
        """
        if self.plugin is None or not sent:
            return []
        wanted = {name: [tensor.rows, tensor.stride] for name, tensor in sent.items()}
        comparisons = []
        for rank, held in enumerate(workers := self.http.rpc(DIGESTS, timeout, wanted=wanted)):
            for name, entry in held.items():
                now, old = sent[name].values, before.get(name)
                if entry["shape"] != list(now.shape):
                    continue
                dtype, digest = getattr(torch, entry["dtype"]), entry["sha256"]
                equal = digest == digest_of_rows(now.to(dtype))
                comparisons.append(
                    TensorComparison(
                        name=name if len(workers) == 1 else f"{name} of worker {rank}",
                        equal=equal,
                        max_abs_diff=0.0 if equal else None,
                        matches_previous=None if old is None else digest == digest_of_rows(old.values.to(dtype)),
                    )
                )
        return comparisons

    def send(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Send tensors of a weight update that has begun, in the bodies of requests; only for servers with `BACKEND`.

        Raises:
            EngineError: The server failed to load them.
        """
        assert self.backend == BACKEND
        # As they are now: TRL unmerges LoRA adapters again, and gives gathered shards back.
        copies = ((name, values.detach().cpu().clone()) for name, values in parameters)
        for part in in_parts(copies, REQUEST_BYTES):
            info = {
                "names": [name for name, _ in part],
                "dtypes": [str(values.dtype).removeprefix("torch.") for _, values in part],
                "shapes": [list(values.shape) for _, values in part],
                "data": [_base64(values) for _, values in part],
            }
            self.http.post("/update_weights", {"update_info": info})

    @property
    def weight_version(self) -> str:
        """The name of the last weight update; "default" before the first."""
        return self.name_of_weights()

    @weight_version.setter
    def weight_version(self, name: str) -> None:
        self.http.post("/update_weight_version", {"new_version": name})

    def name_of_weights(self, timeout: float | None = None) -> str:
        """Return `weight_version`; `timeout` is as for `score`."""
        return str(self.http.json("GET", ALIVE, timeout=timeout)["weight_version"])


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).decode()
