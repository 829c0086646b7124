"""Verified weight updates of SGLang, for your own training loop; vLLM's adapter has a class of the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from mismatch_ext.adapters.sglang.probes import decode_tokens, score_tokens
from mismatch_ext.adapters.sglang.transport import Transport
from mismatch_ext.adapters.sglang.weights import update_weights
from torch import Tensor

from mismatch_ext.weight_sync import Decoded, TensorComparison
from mismatch_ext.weight_sync.updates import NamedTensors, Updating, VerifiedUpdates


class Remote:
    """The questions that a weight check asks an SGLang engine.

    Args:
        transport: The engine.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def score(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities `[N, T-1]`, float64, that prefill gives to all tokens of `[N, T]` except the first."""
        return score_tokens(self.transport, tokens.tolist())

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Decode `count` tokens, always the likeliest, after each prompt of `[N, P]`."""
        return decode_tokens(self.transport, tokens.tolist(), count)

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Return no comparisons, because SGLang's weights cannot be read."""
        return ()


class VerifiedWeights(VerifiedUpdates):
    """Sends the trainer's weights, and checks each time that the engine computes with them.

    Both sides score fixed probe tokens. The engine must hold the trainer's weights when this object is built. After an update,
    responses report the weight version `str(version)`.

    Args:
        transport: The engine.
        parameters: Returns checkpoint names and tensors on every call.
        score: Maps probe tokens `[N, T]` to the trainer's log-probabilities `[N, T-1]` at temperature 1.
        probes: Probe tokens `[N, T]`, int64.
        dtype: The engine's dtype.
        trainer_dtype: The trainer's compute dtype; None if it is the engine's or finer.
        version: Number of updates that were begun on the engine.
        decode_tokens: Number of last tokens of each probe that the engine decodes anew, to compare its decoding with its prefill;
            0 for none.

    Raises:
        EngineError: The engine failed.
    """

    def __init__(
        self,
        transport: Transport,
        parameters: Callable[[], NamedTensors],
        score: Callable[[Tensor], Tensor],
        **settings: Unpack[Updating],
    ) -> None:
        self.transport = transport
        super().__init__(Remote(transport), parameters, score, **settings)

    def _send(self) -> Mapping[str, Any]:
        update_weights(self.transport, self.parameters(), dtype=self.dtype, weight_version=self.version)
        return {}
