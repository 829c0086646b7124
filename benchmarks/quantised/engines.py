"""Real engines that say a whole distribution of each token: vLLM and SGLang, each in this process.

Suffixes of shapes: N tokens of all responses; V ids of the vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from mismatch_ext.adapters.doctor.asking import ToSample
from numpy.typing import NDArray

from mismatch_ext.doctor import Sample
from mismatch_ext.errors import EngineError

Floats = NDArray[np.float64]
LONGEST = 256


class Engine(Protocol):
    """A running engine."""

    def quantises(self) -> bool:
        """Tell whether anything of the model is quantised."""

    def sample(self, prompts: Sequence[Sequence[int]], tokens: int) -> Sample:
        """Return a response to each prompt, of so many tokens at most."""

    def distributions(self, sample: Sample) -> Floats:
        """Return the log-probabilities of every id at every token of the responses `[N, V]`, of prefill."""

    def whole_inputs(self, checkpoint: Path) -> AbstractContextManager[None]:
        """Let quantised layers take what goes into them as it is, while their weights stay what quantisation left of them."""

    def compared_inputs(self) -> AbstractContextManager[dict[str, int]]:
        """Count what goes into quantised layers, and which of it the engine rounds otherwise than `formats` says."""

    def shutdown(self) -> None:
        """End it."""


def start(kind: str, checkpoint: Path, arguments: Mapping[str, Any], vocabulary: int) -> Engine:
    """Start an engine in bfloat16.

    Args:
        kind: "vllm" or "sglang".
        checkpoint: What it serves.
        arguments: Its own.
        vocabulary: Ids of the model.

    Raises:
        EngineError: It does not start; says why in the engine's own words.
    """
    made = {"vllm": Vllm, "sglang": Sglang}[kind]
    try:
        return made(checkpoint, arguments, vocabulary)
    except Exception as error:  # an engine without a kernel for a CPU ends with whatever its code came to
        raise EngineError(" ".join(str(error).split()) or type(error).__name__) from error


class Vllm:
    """vLLM, whose layers are in reach."""

    def __init__(self, checkpoint: Path, arguments: Mapping[str, Any], vocabulary: int) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from mismatch_ext.adapters.vllm.doctor import VllmEngine, free_share
        from vllm import LLM

        asked: dict[str, Any] = {"dtype": "bfloat16", "logprobs_mode": "processed_logprobs", "disable_log_stats": True}
        asked |= {
            "generation_config": "vllm",
            "enforce_eager": True,
            "max_model_len": LONGEST,
            "max_logprobs": vocabulary,
        }
        self._llm = LLM(str(checkpoint), **asked | {"gpu_memory_utilization": free_share()} | dict(arguments))
        self._asks, self._vocabulary = VllmEngine.around(self._llm), vocabulary

    def quantises(self) -> bool:
        """Tell whether anything of the model is quantised: read off its layers and its cache."""
        reading = self._asks.reading
        return reading.quantization is not None or reading.kv_cache_dtype not in ("auto", reading.model_dtype)

    def sample(self, prompts: Sequence[Sequence[int]], tokens: int) -> Sample:
        """Return a response to each prompt, of so many tokens at most."""
        return self._asks.sample(
            ToSample(prompts=prompts, responses=len(prompts), max_tokens=tokens, sampling={"seed": 0})
        )

    def distributions(self, sample: Sample) -> Floats:
        """Return the log-probabilities of every id at every token of the responses `[N, V]`, of prefill."""
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=self._vocabulary, detokenize=False)
        requests: list[Any] = [{"prompt_token_ids": ids} for ids in whole(sample)]
        found = []
        for output, prompt in zip(self._llm.generate(requests, asked, use_tqdm=False), sample.prompts, strict=True):
            assert output.prompt_logprobs is not None  # asked for
            for entry in output.prompt_logprobs[len(prompt) :]:
                assert entry is not None  # that of the first token alone is
                found.append([entry[token].logprob for token in range(self._vocabulary)])
        return np.array(found, dtype=np.float64)

    def whole_inputs(self, checkpoint: Path) -> AbstractContextManager[None]:
        """Let quantised layers take what goes into them as it is, while their weights stay what quantisation left of them."""
        from benchmarks.quantised.layers import whole_inputs

        return whole_inputs(self._llm, checkpoint)

    def compared_inputs(self) -> AbstractContextManager[dict[str, int]]:
        """Count what goes into quantised layers, and which of it the engine rounds otherwise than `formats` says."""
        from benchmarks.quantised.layers import compared_inputs

        return compared_inputs()

    def shutdown(self) -> None:
        """End it."""
        self._asks.shutdown()


class Sglang:
    """SGLang, whose layers are in another process."""

    def __init__(self, checkpoint: Path, arguments: Mapping[str, Any], vocabulary: int) -> None:
        from mismatch_ext.adapters.sglang.doctor import SglangEngine

        self._asks = SglangEngine(
            str(checkpoint), dtype="bfloat16", arguments={"skip_tokenizer_init": True, **arguments}
        )
        self._vocabulary = vocabulary

    def quantises(self) -> bool:
        """Tell whether anything of the model is quantised, as SGLang says itself."""
        reading = self._asks.reading
        return reading.quantization is not None or reading.kv_cache_dtype not in ("auto", reading.model_dtype)

    def sample(self, prompts: Sequence[Sequence[int]], tokens: int) -> Sample:
        """Return a response to each prompt, of so many tokens at most."""
        return self._asks.sample(ToSample(prompts=prompts, responses=len(prompts), max_tokens=tokens, sampling={}))

    def distributions(self, sample: Sample) -> Floats:
        """Return the log-probabilities of every id at every token of the responses `[N, V]`, of prefill."""
        from mismatch_ext.adapters.sglang.probes import SCORING
        from mismatch_ext.adapters.sglang.request import generate_request

        request = generate_request(whole(sample), SCORING, max_new_tokens=0, prompt_logprobs=True)
        outputs = self._asks._generated(request | {"top_logprobs_num": self._vocabulary}, {})
        found = []
        for output, prompt in zip(outputs, sample.prompts, strict=True):
            for entry in output["meta_info"]["input_top_logprobs"][len(prompt) :]:
                by_id = {int(token): float(logprob) for logprob, token, *_ in entry}
                found.append([by_id[token] for token in range(self._vocabulary)])
        return np.array(found, dtype=np.float64)

    def whole_inputs(self, checkpoint: Path) -> AbstractContextManager[None]:
        """Fail: its layers are out of reach."""
        raise NotImplementedError(
            f"{checkpoint}: SGLang's layers are in another process; its formats here have one part"
        )

    @contextmanager
    def compared_inputs(self) -> Iterator[dict[str, int]]:
        """Count nothing: its layers are out of reach."""
        with nullcontext():
            yield {}

    def shutdown(self) -> None:
        """End it."""
        self._asks.shutdown()


def whole(sample: Sample) -> list[list[int]]:
    """Return each prompt with its response."""
    return [[*prompt, *response] for prompt, response in zip(sample.prompts, sample.responses, strict=True)]
