"""The engine's side of your own training loop: SGLang, in the trainer's process or over HTTP."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mismatch_ext.adapters.placeholders import placeholders_at, refuse_placeholders
from mismatch_ext.adapters.sglang.answers import to_records
from mismatch_ext.adapters.sglang.engine import EngineTransport, Transport
from mismatch_ext.adapters.sglang.probes import decode_tokens, score_tokens
from mismatch_ext.adapters.sglang.request import generate_request
from mismatch_ext.adapters.sglang.server import check_server, read_server, routing_problems
from mismatch_ext.adapters.sglang.weights import update_weights
from torch import Tensor

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError, RoutingError
from mismatch_ext.precision.audit import EngineReading, SyncReading
from mismatch_ext.rollout import RolloutRecord, SamplingSettings, to_provenance
from mismatch_ext.routing import RoutingShape
from mismatch_ext.weights import Decoded, NamedTensors, TensorComparison

ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 16384,
    "grammar_backend": "none",
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # otherwise a waiting scheduler takes a core from the trainer
}
"""Arguments with which SGLang runs on a CPU."""


class Rollout:
    """`RolloutSide` of SGLang.

    Args:
        transport: The engine; `Rollout.launch` starts one in this process as a block asks for it.
        sampling: Settings to sample with.
        max_new_tokens: Largest number of tokens of a response.
        n: Responses per prompt.
        stop_token_ids: Tokens that end a response, in addition to the model's own end tokens.

    Attributes:
        weight_version: Number of updates that were begun on the engine.
        patches: Empty, because SGLang is not patched.

    Raises:
        EngineError: The engine does not answer, or its report is not one of SGLang.
    """

    patches: tuple[Mapping[str, Any], ...] = ()
    patch_digest = "none"
    longest: int | None = None

    def __init__(
        self,
        transport: Transport,
        sampling: SamplingSettings,
        *,
        max_new_tokens: int,
        n: int = 1,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self.transport = transport
        self.sampling, self.max_new_tokens, self.n = sampling, max_new_tokens, n
        self.stop_token_ids = tuple(stop_token_ids)
        self.weight_version = 0
        self._info = transport.server_info()
        self._reading = read_server(self._info)
        self._shape: RoutingShape | None = None
        self._placeholders = placeholders_at(self._info.get("model_path"))

    @classmethod
    def launch(
        cls,
        model: str,
        block: MismatchConfig,
        sampling: SamplingSettings,
        *,
        max_new_tokens: int,
        n: int = 1,
        stop_token_ids: Sequence[int] = (),
        **arguments: Any,
    ) -> Rollout:
        """Start an engine in this process with the dtypes, quantization and routes that a block asks for.

        `check` tells afterwards whether the engine runs as the block needs it.

        Args:
            model: Folder or name of the checkpoint.
            block: The block of the run.
            sampling, max_new_tokens, n, stop_token_ids: As for `Rollout`.
            arguments: Arguments of `sglang.Engine`; they replace those that the block asks for.

        Raises:
            EngineError: The engine's report is not one of SGLang.
        """
        from sglang import Engine

        asked: dict[str, Any] = {} if torch.cuda.is_available() else dict(ON_CPU)
        if block.precision is not None:
            wanted = {
                "dtype": block.precision.dtype,
                "quantization": block.precision.engine_weights,
                "kv_cache_dtype": block.precision.engine_kv_cache,
                "enable_fp32_lm_head": True if block.precision.head == "float32" else None,
            }
            asked |= {name: value for name, value in wanted.items() if value is not None}
        if block.routing is not None and block.routing.mode == "R3":
            asked["enable_return_routed_experts"] = True
        engine = Engine(model_path=model, skip_tokenizer_init=True, **{"log_level": "error", **asked, **arguments})
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "n": n, "stop_token_ids": stop_token_ids}
        return cls(EngineTransport(engine), sampling, **limits)

    def check(self, block: MismatchConfig, trainer_dtype: str) -> None:
        """Refuse a server that the trainer cannot match.

        Args:
            block: The block of the run.
            trainer_dtype: Dtype that the trainer computes in.

        Raises:
            EngineError: A setting does not fit; names each such setting, and what to give instead.
        """
        verdict = check_server(self._info, config=block, trainer_dtype=trainer_dtype)
        verdict.raise_for_problems()
        for note in verdict.notes:
            warnings.warn(note, stacklevel=2)
        if self.n > 1 and self._info.get("enable_deterministic_inference") is True:
            raise EngineError(
                f"n={self.n} with --enable-deterministic-inference: SGLang then returns the same response n times. Leave out the "
                "flag, or sample one response per prompt."
            )

    def reading(self) -> EngineReading:
        """Return the dtypes and modes that the engine computes with, from its own report."""
        return self._reading

    def score(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities `[N, T-1]`, float64, that prefill gives to all tokens of `[N, T]` except the first."""
        return score_tokens(self.transport, tokens.tolist())

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Decode `count` tokens, always the likeliest, after each prompt of `[N, P]`."""
        return decode_tokens(self.transport, tokens.tolist(), count)

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Return no comparisons, because SGLang's weights cannot be read."""
        return ()

    def record_routing(self, shape: RoutingShape) -> None:
        """Ask for the routes of all rollouts from now on.

        Args:
            shape: Routing shape of the model that replays the routes.

        Raises:
            RoutingError: The engine does not record the routes of every token and layer.
        """
        if problems := routing_problems(self._info):
            raise RoutingError("; ".join(map(str, problems)))
        self._shape = shape

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[RolloutRecord]:
        """Sample `n` responses to each prompt; the responses of a prompt are next to each other.

        Args:
            prompts: Token ids of each prompt.

        Raises:
            EngineError: SGLang failed.
            RecordError: A response is malformed, or a prompt has a token that stands for an image, a video or a sound.
            RoutingError: Routes are missing or malformed.
        """
        ids = [list(map(int, prompt)) for prompt in prompts]
        refuse_placeholders(ids, self._placeholders, f"the model at {self._info.get('model_path')}")
        request = generate_request(
            ids,
            self.sampling,
            max_new_tokens=self.max_new_tokens,
            n=self.n,
            stop_token_ids=self.stop_token_ids,
            routing=self._shape is not None,
        )
        return to_records(
            self.transport.generate(request),
            prompt_ids=ids,
            provenance=to_provenance(self._reading, sampling=self.sampling, weight_version=self.weight_version),
            n=self.n,
            weight_version=str(self.weight_version) if self.weight_version else None,
            shape=self._shape,
        )

    def update(self, weights: NamedTensors) -> tuple[SyncReading, dict[str, Any]]:
        """Load new weights and drop what was cached with the previous ones; from then on responses report the new version.

        Args:
            weights: Checkpoint names and tensors of the whole model.

        Returns:
            The dtypes that the tensors came in and were sent in, and an empty dict, because SGLang's tensors cannot be compared.

        Raises:
            PrecisionError: A weight does not fit the engine's dtype.
            EngineError: SGLang refused.
        """
        self.weight_version += 1
        dtype = self._reading.model_dtype
        return update_weights(self.transport, weights, dtype=dtype, weight_version=self.weight_version), {}

    def shutdown(self) -> None:
        """End the engine if it runs in this process."""
        if isinstance(self.transport, EngineTransport):
            self.transport.engine.shutdown()
