"""The engine's side of a training loop that the user wrote: vLLM in the trainer's process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.vllm.cpu_routes import attach_cpu_routes
from mismatch_ext.adapters.vllm.engine import asked_of, is_cpu, read_engine, runner, shutdown
from mismatch_ext.adapters.vllm.head import compare_head
from mismatch_ext.adapters.vllm.heads import expect_top_k, flat_logprobs
from mismatch_ext.adapters.vllm.probes import decode_tokens, score_tokens
from mismatch_ext.adapters.vllm.rollouts import to_records
from mismatch_ext.adapters.vllm.routing import FLAG, require_routing
from mismatch_ext.adapters.vllm.weights import Sending, SentTensor, compare_tensors, update_weights
from mismatch_ext.patches.vllm.cpu_moe_repack import cpu_moe_repack
from mismatch_ext.patches.vllm.cpu_routes import cpu_routes_patches
from torch import Tensor

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, EngineError
from mismatch_ext.patching import applied, described, digest_of
from mismatch_ext.precision.audit import EngineReading, SyncReading
from mismatch_ext.presets import resolve
from mismatch_ext.rollout import Provenance, RolloutRecord, SamplingSettings, to_provenance
from mismatch_ext.routing import RoutingShape
from mismatch_ext.weights import Decoded, NamedTensors, TensorComparison

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.inputs import TokensPrompt


class InProcess:
    """The rollout side of an engine in this process.

    Args:
        llm: The engine.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def reading(self) -> EngineReading:
        """Return what the engine computes with."""
        return read_engine(self.llm)

    def score(self, tokens: Tensor) -> Tensor:
        """Return prefill's log-probabilities `[N, T-1]`, float64, of tokens `[N, T]` after the first."""
        return score_tokens(self.llm, tokens.tolist())

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Sample `count` tokens after each prompt of `[N, P]`, with seeds of their own."""
        return decode_tokens(self.llm, tokens.tolist(), count)

    def decode_afresh(self, tokens: Tensor, count: int) -> Decoded:
        """Sample as `decode` does, but pass the prefix cache by.

        Raises:
            EngineError: Several ranks share the engine; one of them may ask for this alone, and would wait for the others.
        """
        if self.llm.llm_engine.vllm_config.parallel_config.world_size > 1:
            raise EngineError("an engine that several ranks share is not asked to decode past its prefix cache.")
        return decode_tokens(self.llm, tokens.tolist(), count, afresh=True)

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare embeddings and norms with what was sent (`Sending.samples`), and a CPU's output head with its weights."""
        comparisons = compare_tensors(self.llm, sent, before)
        head = compare_head(runner(self.llm).model) if is_cpu(self.llm) else None
        return comparisons if head is None else [*comparisons, head]


class Rollout(InProcess):
    """`RolloutSide` of vLLM in this process.

    Args:
        llm: An engine; `Rollout.launch` starts one as a block asks for it.
        sampling: Settings to sample with.
        max_new_tokens: Largest number of tokens in a response.
        n: Responses per prompt.
        stop_token_ids: Ids of tokens that end a response, besides the model's own.
        patches: The patches that were applied while the engine was built; on a CPU, those of each weight update are added.

    Attributes:
        weight_version: Number of weight updates that were begun on the engine.

    Raises:
        EngineError: The engine runs in another process, or it reports log-probabilities before the temperature, and the
            temperature is not 1.
    """

    def __init__(
        self,
        llm: LLM,
        sampling: SamplingSettings,
        *,
        max_new_tokens: int,
        n: int = 1,
        stop_token_ids: Sequence[int] = (),
        patches: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(llm)
        self.sampling, self.max_new_tokens, self.n = sampling, max_new_tokens, n
        self.stop_token_ids = tuple(stop_token_ids)
        # The patches that the engine was built with, and those of each weight update.
        all_patches = [dict(patch) for patch in patches] + (described(*cpu_moe_repack()) if is_cpu(llm) else [])
        self.patches: Sequence[Mapping[str, Any]] = tuple(all_patches)
        self.patch_digest = digest_of(all_patches) if all_patches else "none"
        self.weight_version = 0
        self._reading = read_engine(llm)
        self._shape: RoutingShape | None = None
        self._top_k = 0
        if self._reading.logprobs_mode.startswith("raw") and sampling.temperature != 1:
            raise EngineError(
                f"the vLLM engine reports {self._reading.logprobs_mode}, before the temperature, and is to sample at "
                f"temperature {sampling.temperature}; start it with LLM(..., logprobs_mode='processed_logprobs')."
            )

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
        """Start an engine in this process as a block asks for it: its dtype, its routes, and what a CPU needs for them.

        Args:
            model: Folder or name of the checkpoint.
            block: The block of the run.
            sampling, max_new_tokens, n, stop_token_ids: As for `Rollout`.
            arguments: Arguments of `vllm.LLM`; they override the block's.

        Raises:
            PatchError: This vLLM records no routes on a CPU, and cannot be made to.
        """
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that its weights and dtypes can be read
        from vllm import LLM
        from vllm.platforms import current_platform

        asked: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
        patches = []
        if block.precision is not None:
            asked |= asked_of(block.precision)
            if "hf_overrides" in asked:
                arguments["hf_overrides"] = _beside(asked["hf_overrides"], arguments.get("hf_overrides"))
        if block.routing is not None and block.routing.mode == "R3":
            asked[FLAG] = True
        if block.correction is not None and (section := resolve(block.correction).centering) is not None:
            asked["max_logprobs"] = section.top_k
        if current_platform.is_cpu():
            asked["enforce_eager"] = True  # compiling costs a CPU engine more than it saves in a short run
            patches = cpu_routes_patches() if FLAG in asked else []
        with applied(*patches) as building:
            llm = LLM(model, **asked | arguments)
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "n": n, "stop_token_ids": stop_token_ids}
        return cls(llm, sampling, **limits, patches=building)

    def record_routing(self, shape: RoutingShape) -> None:
        """Take the routes of rollouts from now on.

        Args:
            shape: The routing shape of the model that replays them.

        Raises:
            RoutingError: The engine does not record routes.
        """
        require_routing(self.llm)
        attach_cpu_routes(self.llm)
        self._shape = shape

    def record_heads(self, top_k: int) -> None:
        """Take the engine's most likely tokens with the rollouts from now on.

        Args:
            top_k: How many at each place; all of a vocabulary that is smaller.

        Raises:
            EngineError: The engine reports fewer.
        """
        self._top_k = expect_top_k(self.llm, top_k)

    def check(self, block: MismatchConfig, trainer_dtype: str) -> None:
        """Accept every block: the audit compares what the engine computes with, and nothing else can be wrong."""

    @property
    def longest(self) -> int:
        """Largest number of tokens of a sequence that can be scored."""
        return int(self.llm.llm_engine.model_config.max_model_len) - 1

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[RolloutRecord]:
        """Sample `n` responses to each prompt; the responses to one prompt follow each other.

        Args:
            prompts: Token ids of each prompt.

        Raises:
            RecordError: vLLM returned something malformed.
            RoutingError: Routes are missing or malformed.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            **asdict(self.sampling),
            n=self.n,
            max_tokens=self.max_new_tokens,
            stop_token_ids=list(self.stop_token_ids),
            logprobs=self._top_k,
            **flat_logprobs() if self._top_k else {},
        )
        ids = [list(map(int, prompt)) for prompt in prompts]
        requests: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in ids]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return to_records(
            outputs, prompt_ids=ids, provenance=self._provenance(), shape=self._shape, n=self.n, top_k=self._top_k
        )

    def update(self, weights: NamedTensors) -> tuple[SyncReading, dict[str, SentTensor]]:
        """Load new weights, and reset the prefix cache, which was computed with the weights before.

        Args:
            weights: Checkpoint names and tensors of the whole model.

        Returns:
            The dtypes that were sent and received, and samples of what was sent, for `compare`.

        Raises:
            EngineError: Unfinished requests hold blocks of the prefix cache.
        """
        self.weight_version += 1
        sending = Sending()
        update_weights(self.llm, sending.through(weights))
        received = self._reading.model_dtype
        return SyncReading(sent_dtype=" and ".join(sorted(sending.dtypes)), received_dtype=received), sending.samples

    def shutdown(self) -> None:
        """End the engine."""
        shutdown(self.llm)

    def _provenance(self) -> Provenance:
        return to_provenance(
            self._reading, sampling=self.sampling, weight_version=self.weight_version, patch_digest=self.patch_digest
        )


def _beside(asked: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """Return what a block asks of `hf_overrides`, with what the user gives, which takes precedence.

    Raises:
        ConfigError: It is a function, which cannot be added to.
    """
    if callable(given):
        raise ConfigError(
            "mismatch.precision.head with hf_overrides that is a function: let it return a configuration whose head_dtype is "
            "'float32', and leave out mismatch.precision.head, or give a mapping."
        )
    return {**asked, **(given or {})}
