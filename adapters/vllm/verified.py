"""Weight updates of an in-process vLLM engine in a plain loop, each verified; SGLang's adapter has the same class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from mismatch_ext.adapters.vllm.engine import read_engine
from mismatch_ext.adapters.vllm.probes import decode_tokens, score_tokens
from mismatch_ext.adapters.vllm.weights import Sending, compare_tensors, update_weights
from torch import Tensor

from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.weight_sync import Decoded, TensorComparison
from mismatch_ext.weight_sync.updates import NamedTensors, Updating, VerifiedUpdates

if TYPE_CHECKING:
    from vllm import LLM


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

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare the engine's embeddings and norms with what was sent: `Sending.samples` of this update and the one before."""
        return compare_tensors(self.llm, sent, before)


class VerifiedWeights(VerifiedUpdates):
    """Sends the trainer's weights, and checks each time that the engine computes with them.

    Both sides score fixed probe tokens, and tensors that both hold in one layout are compared bit by bit. The engine must hold
    the trainer's weights when this is built. An update resets the prefix cache.

    Args:
        llm: An engine in this process.
        parameters: Returns checkpoint names and tensors of the whole model each time that it is called.
        score: Maps probe tokens `[N, T]` to the trainer's log-probabilities `[N, T-1]` at temperature 1.
        probes: Probe tokens `[N, T]`, int64; T is at most the engine's context length minus one.
        dtype: The engine's dtype.
        trainer_dtype: The trainer's compute dtype; None if it is the engine's or finer.
        version: Number of weight updates that were begun on the engine.
        decode_tokens: Number of last tokens of each probe that the engine decodes instead; its decode log-probabilities are
            compared with its prefill's. 0 decodes none.

    Raises:
        EngineError: The engine runs in another process.
    """

    def __init__(
        self,
        llm: LLM,
        parameters: Callable[[], NamedTensors],
        score: Callable[[Tensor], Tensor],
        **settings: Unpack[Updating],
    ) -> None:
        self.llm = llm
        super().__init__(InProcess(llm), parameters, score, **settings)

    def _send(self) -> Mapping[str, Any]:
        sending = Sending()
        update_weights(self.llm, sending.through(self.parameters()))
        return sending.samples
