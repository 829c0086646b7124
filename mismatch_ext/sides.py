"""The protocols of a run's two sides: the trainer's model, and the engine that samples from it.

Adapters build these sides from their hosts. A run calls nothing else of trainer or engine, so that any objects with these methods
can be checked, corrected and recorded as TRL and verl are. `LoopTrainer` and `LoopRollout` are the sides of your own training
loop, whose steps and weight updates `Run` makes itself. Everything that such a side takes and returns can be imported from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mismatch_ext.names import HostNames
from mismatch_ext.precision.audit import EngineReading, SyncReading, TrainerReading
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.rollout import Batch, Provenance, RolloutRecord, SamplingSettings, to_provenance
from mismatch_ext.routing import RoutingShape
from mismatch_ext.weights import Decoded, NamedTensors, ProbedEngine, ProbedTrainer, TensorComparison, fingerprint

__all__ = [
    "Batch",
    "Decoded",
    "EngineReading",
    "HostNames",
    "LoopRollout",
    "LoopTrainer",
    "LossScaler",
    "NamedTensors",
    "Provenance",
    "RecordsHeads",
    "RolloutRecord",
    "RolloutSide",
    "RoutingShape",
    "SamplingSettings",
    "SyncReading",
    "TensorComparison",
    "TrainerReading",
    "TrainerSide",
    "fingerprint",
    "to_provenance",
]


@runtime_checkable
class TrainerSide(ProbedTrainer, Protocol):
    """The model being trained, as its host holds it."""

    def reading(self) -> TrainerReading:
        """Return the dtypes that the trainer computes with, read back from the model."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the current weights; may be called again."""

    def fingerprint(self) -> str:
        """Return a digest of the current weights, which changes when the weights change."""
        return fingerprint(self.named_parameters())


@runtime_checkable
class RolloutSide(ProbedEngine, Protocol):
    """The engine that samples, in this process or behind a transport."""

    def reading(self) -> EngineReading:
        """Return the dtypes and modes that the engine computes with, read back from it."""


@runtime_checkable
class LoopTrainer(TrainerSide, Protocol):
    """The trainer's side of your own training loop."""

    optimizer: Any
    """A torch optimizer."""
    scheduler: Any
    """The learning-rate schedule of the optimizer; None without one."""
    scaler: LossScaler | None
    """The loss scaler that `compute_in` was given."""

    @property
    def device(self) -> torch.device:
        """The model's device."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def family(self) -> str:
        """The model's architecture; "" if it is not known."""

    @property
    def routing(self) -> Any:
        """The `mismatch_ext.routing.replay.Backend` that records and replays routes in the model."""

    def compute_in(self, dtype: str, scaler: LossScaler | None) -> None:
        """Run forward passes in a dtype from now on, and let a scaler scale the loss."""

    def policy(self, *, reference: bool = False) -> Any:
        """Return the model, or the model of the reference policy."""

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return log-probabilities `[B, T]` of a batch's responses, in nats at the batch's temperature, with their graph."""

    def logits(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return the logits `[B, T, V]` that give the response tokens' probabilities."""

    def checkpoint_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current weights under the names and in the shapes that the engine loads."""

    def vocabulary(self) -> Tensor:
        """Return the token ids `[V]`, int64, that probes may consist of."""

    def surplus(self) -> Any:
        """Return an object whose `str` warns of tokens that can be sampled and not decoded; None if there are none."""

    def dropped_attention(self) -> Any:
        """Return an object whose `str` warns that the model's attention leaves out a part of the model; None if it does not."""


@runtime_checkable
class LoopRollout(RolloutSide, Protocol):
    """The engine's side of your own training loop."""

    sampling: SamplingSettings
    weight_version: int
    """Number of updates that were begun on the engine."""

    @property
    def patches(self) -> Sequence[Mapping[str, Any]]:
        """Descriptions of the patches that were applied while the engine was built."""

    @property
    def longest(self) -> int | None:
        """Length in tokens of the longest sequence that can be scored; None if there is no limit."""

    def check(self, block: Any, trainer_dtype: str) -> None:
        """Refuse an engine that does not run as the block needs it."""

    def record_routing(self, shape: RoutingShape) -> None:
        """Add the routes to all rollouts from now on; refuse if the engine cannot record them."""

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[RolloutRecord]:
        """Sample responses to prompts of token ids."""

    def update(self, weights: NamedTensors) -> tuple[SyncReading, Mapping[str, Any]]:
        """Load new weights under the next version; return the dtypes on the way, and samples for `compare`."""


@runtime_checkable
class RecordsHeads(Protocol):
    """An engine's side that can report its most likely tokens, for score centering."""

    def record_heads(self, top_k: int) -> None:
        """Add the `top_k` most likely tokens at each place to all rollouts from now on; refuse if the engine reports fewer."""
