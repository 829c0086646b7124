"""What a run needs of its two sides: the trainer's model, and the engine that samples from it.

Adapters build these from their hosts. A run asks nothing else of trainer or engine, so that whatever has these methods can be
checked, corrected and recorded as TRL and verl are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mismatch_ext.fingerprint import fingerprint
from mismatch_ext.precision.audit import EngineReading, TrainerReading
from mismatch_ext.weight_sync.checker import TensorComparison


@runtime_checkable
class TrainerSide(Protocol):
    """The model being trained, as its host holds it."""

    def reading(self) -> TrainerReading:
        """Return what it computes with, read back from it."""

    def score(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities `[N, T-1]` at temperature 1, in nats, of tokens `[N, T]` (int64) after the first."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the present weights; may be called again."""

    def fingerprint(self) -> str:
        """Return a digest of the present weights, which changes when they do."""
        return fingerprint(self.named_parameters())


@runtime_checkable
class RolloutSide(Protocol):
    """The engine that samples, in this process or behind a transport."""

    def reading(self) -> EngineReading:
        """Return what it computes with, read back from it."""

    def score(self, tokens: Tensor) -> Tensor:
        """Return prefill's log-probabilities `[N, T-1]` as the trainer's `score` does, in float64."""

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare samples of the tensors just sent, and of those before, with what the engine holds; none out of reach."""
