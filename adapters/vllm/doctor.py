"""The engine's side of the doctor: vLLM in this process, with a run's settings, samples tokens and then scores the same."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.doctor.asking import ToSample, sequences
from mismatch_ext.adapters.transformers.checkpoint import under_checkpoint_names
from mismatch_ext.adapters.vllm.cpu_routes import attach_cpu_routes
from mismatch_ext.adapters.vllm.doctor_blocks import Held, holding
from mismatch_ext.adapters.vllm.engine import read_engine, runner, shutdown
from mismatch_ext.adapters.vllm.head import compute_logits, plain_head
from mismatch_ext.adapters.vllm.probes import prefill_params
from mismatch_ext.adapters.vllm.rollouts import to_records
from mismatch_ext.adapters.vllm.routing import FLAG, to_traces
from mismatch_ext.adapters.vllm.weights import update_weights
from mismatch_ext.patches.vllm.cpu_routes import cpu_routes_patches
from torch import Tensor, nn

from mismatch_ext.doctor import Sample
from mismatch_ext.errors import ConfigError, EngineError
from mismatch_ext.patching import applied
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.rollout import to_provenance
from mismatch_ext.routing import RoutingShape

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs import TokensPrompt

# Arguments by which a run says how much memory its engine takes.
SIZES_OF_MEMORY = {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"}
# A cache holds so many times what is asked for: the prefix cache keeps what was asked for before.
KEPT = 2


class VllmEngine:
    """A vLLM engine in this process.

    Args:
        model: Folder of the checkpoint that it serves.
        dtype: Its compute dtype.
        shape: The shape of the routes that it has to record; None for a model without experts.
        arguments: Arguments of `vllm.LLM`, as the run has them.
        lengths: Number of tokens of each sequence that it has to hold at a time; on a CPU, its KV cache is made for these.

    Attributes:
        reading: What the engine runs with, read back from it.

    Raises:
        ConfigError: vLLM refuses an argument; the message quotes vLLM's.
        EngineError: It does not start.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        shape: RoutingShape | None = None,
        arguments: Mapping[str, Any] | None = None,
        lengths: Sequence[int] = (),
    ) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its settings are read back from its objects
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to where the table is printed
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ConfigError(
                f"--engine vllm: vLLM cannot be imported ({error}); install it beside this package, or give --rollouts."
            ) from error
        asked: dict[str, Any] = {"dtype": dtype, "logprobs_mode": "processed_logprobs", "disable_log_stats": True}
        asked["generation_config"] = "vllm"
        if shape is not None:
            asked[FLAG] = True
        if current_platform.is_cpu():
            asked["enforce_eager"] = True
        asked |= arguments or {}
        if current_platform.is_cpu() and not asked.keys() & SIZES_OF_MEMORY:
            asked |= memory_for(model, asked, lengths)
        self._shape = shape
        try:
            with applied(*(cpu_routes_patches() if shape is not None and current_platform.is_cpu() else [])):
                self._llm = LLM(model, **asked)
        except (TypeError, ValueError, OSError) as error:  # OSError: the folder holds no checkpoint that it knows
            raise ConfigError(f"vLLM refuses the settings {asked}: {' '.join(str(error).split())[:400]}") from error
        except (RuntimeError, AssertionError) as error:  # the latter if there are more ranks than places for them
            raise EngineError(
                f"vLLM does not start with {asked}: {' '.join(str(error).split())[:400]}; if memory is short, give "
                "--engine-arg gpu_memory_utilization=0.5, or a smaller max_model_len; if places for ranks are, one rank."
            ) from error
        try:
            if shape is not None:
                attach_cpu_routes(self._llm)
            self.reading: EngineReading = read_engine(self._llm)
        except BaseException:
            # Nobody else holds the engine yet, so nobody else could end it.
            self.shutdown()
            raise

    def sample(self, asked: ToSample) -> Sample:
        """Sample responses as the run does.

        Args:
            asked: What to sample; its `sampling` holds arguments of `vllm.SamplingParams`.

        Raises:
            ConfigError: vLLM refuses a sampling argument or a prompt.
            RecordError: What vLLM returned is malformed.
        """
        from vllm import SamplingParams

        sampling, prompts = asked.sampling, asked.given
        try:
            params = SamplingParams(n=asked.of_each, max_tokens=asked.max_tokens, logprobs=0, **sampling)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--sampling: vLLM refuses {dict(sampling)}: {' '.join(str(error).split())}") from error
        requests: list[TokensPrompt] = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._generated(requests, seeded(params, len(requests)))
        records = to_records(
            outputs,
            prompt_ids=prompts,
            provenance=to_provenance(self.reading, sampling=asked.settings, weight_version=0),
            shape=asked.routed(self._shape),
            n=params.n,
        )
        return asked.sampled(records)

    def score(self, sample: Sample) -> Sample:
        """Return the same tokens with the log-probabilities that the engine gives them in a prompt, at temperature 1."""
        return self._scored(sample, self._prefilled(sequences(sample)))

    def update(self, model: nn.Module) -> None:
        """Replace the engine's weights by a model's, as a trainer sends them."""
        update_weights(self._llm, under_checkpoint_names(model, model.named_parameters()))

    def score_alone(self, sample: Sample) -> Sample:
        """Return what `score` does, but send one request at a time, each after the one before was answered."""
        return self._scored(sample, [output for ids in sequences(sample) for output in self._prefilled([ids])])

    def blocks(self, rows: Sequence[Sequence[int]]) -> list[Held]:
        """Return the input and output of each block while a sequence is prefilled; none for a sequence in several chunks.

        Args:
            rows: Token ids of each sequence.
        """
        by_row: list[Held] = []
        for ids in rows:
            held: Held = {}
            with holding(runner(self._llm).model, held):
                self._prefilled([list(ids)])
            # A step may be padded beyond the sequence; a step that is shorter than it held only a chunk of it.
            count = len(ids)
            whole = {at: pair for at, pair in held.items() if min(map(len, pair)) >= count}
            by_row.append({at: (given[:count], out[:count]) for at, (given, out) in whole.items()})
        return by_row

    def head(self) -> tuple[Tensor, Tensor] | None:
        """Return random hidden states, and the logits that the output head computes from them; None if it is quantized."""
        head = plain_head(runner(self._llm).model)
        return None if head is None else compute_logits(head)

    def _prefilled(self, rows: list[list[int]]) -> list[RequestOutput]:
        requests: list[TokensPrompt] = [{"prompt_token_ids": ids} for ids in rows]
        return self._generated(requests, prefill_params())

    def _scored(self, sample: Sample, outputs: list[RequestOutput]) -> Sample:
        whole = sequences(sample)
        logprobs = []
        for output, prompt, ids in zip(outputs, sample.prompts, whole, strict=True):
            assert output.prompt_logprobs is not None  # asked for
            tail = zip(output.prompt_logprobs[len(prompt) :], ids[len(prompt) :], strict=True)
            logprobs.append(tuple(float(entry[token].logprob) for entry, token in tail if entry is not None))
        routes = None
        if self._shape is not None:
            traces = to_traces(outputs, prompt_ids=whole, shape=self._shape, version=0)
            # Leave out the one token that vLLM insists on generating.
            routes = tuple(trace.slice(0, len(ids)) for trace, ids in zip(traces, whole, strict=True))
        return replace(sample, logprobs=tuple(logprobs), routes=routes)

    def shutdown(self) -> None:
        """End the engine."""
        shutdown(self._llm)

    def _generated(
        self, requests: list[TokensPrompt], params: SamplingParams | list[SamplingParams]
    ) -> list[RequestOutput]:
        try:
            return self._llm.generate(requests, params, use_tqdm=False)
        except ValueError as error:
            raise ConfigError(
                f"vLLM refuses a request: {' '.join(str(error).split())[:400]}; the doctor asks for a prompt with its response "
                "and one token more: give a larger --engine-arg max_model_len, shorter prompts, or a smaller --max-tokens."
            ) from error
        except (RuntimeError, LookupError, AssertionError, TypeError) as error:
            reason = " ".join(str(error).split())[:400]
            raise EngineError(
                f"vLLM fails while it computes, with {type(error).__name__}: {reason}; try this model in vLLM alone."
            ) from error


def memory_for(model: str, asked: Mapping[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the argument of `vllm.LLM` that bounds a CPU engine's memory, by half of what is free; the rest is the trainer's.

    Args:
        model: Folder of the checkpoint.
        asked: The other arguments of `vllm.LLM`.
        lengths: Number of tokens of each sequence that the engine has to hold at a time; empty if that is not known.
    """
    import psutil

    memory = psutil.virtual_memory()
    half = memory.available // 2
    needed = cache_bytes(model, asked, lengths) if lengths else None
    if needed is not None and needed <= half:
        return {"kv_cache_memory_bytes": needed}
    return {"gpu_memory_utilization": round(max(0.01, half / memory.total), 3)}


def cache_bytes(model: str, asked: Mapping[str, Any], lengths: Sequence[int]) -> int | None:
    """Return the bytes of a KV cache that holds sequences of these lengths; None if a cache is not keys and values alone."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=model, **asked).create_engine_config()
    its_model, block = config.model_config, config.cache_config.block_size
    if its_model.is_hybrid or its_model.is_attention_free or its_model.is_encoder_decoder:
        return None
    layers = its_model.get_num_layers(config.parallel_config)
    heads = its_model.get_num_kv_heads(config.parallel_config)
    dtype = its_model.dtype
    assert isinstance(dtype, torch.dtype)  # vLLM has resolved its name
    token_bytes = 2 * layers * heads * its_model.get_head_size() * dtype.itemsize
    # vLLM generates a token behind each sequence that it scores, and refuses a cache that its longest sequence does not fit into.
    blocks = sum(length // block + 1 for length in lengths)
    longest = its_model.max_model_len // block + 1
    # One block is never used.
    return (KEPT * max(blocks, longest) + 1) * block * token_bytes


def seeded(params: SamplingParams, requests: int) -> list[SamplingParams]:
    """Return the settings of each request; if a seed is given, every response gets a seed that no other response has.

    vLLM seeds response i of a request by seed + i. Requests with the same seed would draw with the same noise, but the doctor's
    statistics assume that responses are independent.
    """
    if params.seed is None:
        return [params] * requests
    each = []
    for request in range(requests):
        copy = params.clone()
        copy.seed = params.seed + request * params.n
        each.append(copy)
    return each
