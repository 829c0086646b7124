"""Weight updates of SGLang in a plain loop, each verified; vLLM's adapter has the same class."""

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
    """What is asked of an SGLang engine about its weights.

    Args:
        transport: The engine.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def score(self, tokens: Tensor) -> Tensor:
        """Return prefill's log-probabilities `[N, T-1]`, float64, of tokens `[N, T]` after the first."""
        return score_tokens(self.transport, tokens.tolist())

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Decode the likeliest `count` tokens after each prompt of `[N, P]`."""
        return decode_tokens(self.transport, tokens.tolist(), count)

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Return nothing: SGLang's weights are out of reach."""
        return ()


class VerifiedWeights(VerifiedUpdates):
    """Sends the trainer's weights, and checks each time that the engine computes with them.

    Both sides score fixed probe tokens. The engine must hold the trainer's weights when this is built. After an update the stamp
    of responses is `str(version)`.

    Args:
        transport: The engine.
        parameters: Returns checkpoint names and tensors each time that it is called.
        score: Maps probe tokens `[N, T]` to the trainer's log-probabilities `[N, T-1]` at temperature 1.
        probes: Probe tokens `[N, T]`, int64.
        dtype: The engine's dtype.
        trainer_dtype: The trainer's compute dtype; None if it is the engine's or finer.
        version: Number of updates that were begun on the engine.
        decode_tokens: Tokens that the engine decodes in the place of each probe's last ones, held to its prefill; 0 for none.

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
