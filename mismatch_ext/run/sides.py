"""What a run needs of its two sides: the trainer's model, and the engine that samples from it.

Adapters build these from their hosts. A run asks nothing else of trainer or engine, so that whatever has these methods can be
checked, corrected and recorded as TRL and verl are. `LoopTrainer` and `LoopRollout` are the sides of a loop of one's own, whose
steps and weight updates `Run` makes itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mismatch_ext.fingerprint import fingerprint
from mismatch_ext.precision.audit import EngineReading, SyncReading, TrainerReading
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.records import RolloutRecord, SamplingSettings
from mismatch_ext.routing import RoutingShape
from mismatch_ext.run.batch import Batch
from mismatch_ext.weight_sync.checker import TensorComparison
from mismatch_ext.weight_sync.decoding import Decoded
from mismatch_ext.weight_sync.updates import NamedTensors


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

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Sample `count` tokens after each prompt of `[N, P]`, the same ones as long as the weights are the same.

        At temperature 1, without truncation, beyond tokens that end a text; its own random numbers are left as they are.
        """

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare samples of the tensors just sent, and of those before, with what the engine holds; none out of reach."""


@runtime_checkable
class LoopTrainer(TrainerSide, Protocol):
    """The trainer's side of a loop of one's own."""

    optimizer: Any
    """A torch optimizer."""
    scheduler: Any
    """The schedule of its rate; None without."""
    scaler: LossScaler | None
    """What `compute_in` was given."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def family(self) -> str:
        """Its architecture; "" where that is not known."""

    @property
    def patches(self) -> Sequence[Mapping[str, Any]]:
        """What is patched around each pass that is replayed or recorded."""

    @property
    def routing(self) -> Any:
        """What records and replays routes in the model: a `mismatch_ext.routing.replaying.Backend`."""

    def compute_in(self, dtype: str, scaler: LossScaler | None) -> None:
        """Run forward passes in a dtype from here on, and let a scaler scale the loss."""

    def policy(self, *, reference: bool = False) -> Any:
        """Return the model, or the reference policy's."""

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return log-probabilities of a batch's responses `[B, T]`, in nats at its temperature, with their graph."""

    def logits(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return the logits that they are drawn by `[B, T, V]`."""

    def checkpoint_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the present weights under the names and in the shapes that the engine loads."""

    def vocabulary(self) -> Tensor:
        """Return the token ids `[V]`, int64, that probes may be made of."""

    def surplus(self) -> Any:
        """Return what can be sampled and not decoded, with its `str` the warning; None where there is nothing to say."""


@runtime_checkable
class LoopRollout(RolloutSide, Protocol):
    """The engine's side of a loop of one's own."""

    sampling: SamplingSettings
    weight_version: int
    """Updates that were begun on the engine."""

    @property
    def patches(self) -> Sequence[Mapping[str, Any]]:
        """What was applied while it was built."""

    @property
    def longest(self) -> int | None:
        """Most tokens that can be scored at once; None if that is no limit."""

    def check(self, block: Any, trainer_dtype: str) -> None:
        """Refuse an engine that runs otherwise than the block needs it."""

    def record_routing(self, shape: RoutingShape) -> None:
        """Take the routes of rollouts from here on, or refuse to."""

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[RolloutRecord]:
        """Sample responses to prompts of token ids."""

    def update(self, weights: NamedTensors) -> tuple[SyncReading, Mapping[str, Any]]:
        """Load new weights under the next version; return the dtypes on the way, and samples for `compare`."""
