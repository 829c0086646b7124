"""A run's two sides, as the doctor starts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mismatch_ext.adapters.doctor.server import Address

    from mismatch_ext.doctor import Sample
    from mismatch_ext.doctor.asking import ToSample
    from mismatch_ext.routing import RoutingShape


class DoctorsEngine(Protocol):
    """An engine that the doctor asks about tokens."""

    def sample(self, asked: ToSample) -> Sample:
        """Sample responses as the run does.

        Args:
            asked: What is to be sampled; its settings are by the engine's names.
        """

    def score(self, sample: Sample) -> Sample:
        """Return the same tokens with the engine's log-probabilities of them as part of a prompt: no sampling, temperature 1."""

    def shutdown(self) -> None:
        """End what was started for it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run's two sides are started with.

    Args:
        model: Checkpoint that the trainer holds, or the adapter that it trains.
        engine_model: Checkpoint or adapter that the engine serves, an adapter merged; None for the same.
        dtype: The engine's compute dtype.
        trainer_dtype: The trainer's, under autocast unless it is float32.
        trainer_weights: Dtype that the trainer holds or gathers its weights in while it computes.
        trainer_config: What the trainer's model is built with that the checkpoint's configuration does not say.
        replays: Whether the trainer replays the engine's expert routes.
        temperature: What the trainer divides logits by.
        sampling: Arguments of the engine's sampling.
        arguments: Arguments of the engine.
        older: Checkpoints or adapters whose weights the engine may have kept.
        engine: Kind of the engine, "vllm" or "sglang"; sampling and arguments are by its names.
        server: A server that is asked in the place of an engine that is started.
        layout: How the trainer lays sequences into a batch: right, left, left-positions or packed.
        head: What the trainer's head computes in, if not in what the rest does: float32.
        oracle: What both are held against: float32 or float64.
        blocks: Whether engine and trainer are held against each other block by block where nothing is left, too.
    """

    model: str
    engine_model: str | None = None
    dtype: str = "bfloat16"
    trainer_dtype: str = "bfloat16"
    trainer_weights: str = "float32"
    trainer_config: Mapping[str, Any] = field(default_factory=dict)
    replays: bool = False
    temperature: float = 1.0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    older: tuple[str, ...] = ()
    engine: str = "vllm"
    server: Address | None = None
    layout: str = "right"
    head: str = ""
    oracle: str = "float32"
    blocks: bool = False

    def start(self, shape: RoutingShape | None) -> DoctorsEngine:
        """Start the engine of this run, or turn to its server.

        Args:
            shape: Of the routes that it is to record; None for a model without experts.
        """
        if self.server is not None:
            from mismatch_ext.adapters.doctor.server import connect, engine_of

            return engine_of(connect(self.server), shape)
        from mismatch_ext.adapters.transformers.peft_adapters import served

        option = "--model" if self.engine_model is None else "--engine-model"
        # A merged adapter is in a folder that is gone once the engine has loaded it.
        with served(self.engine_model or self.model, option) as folder:
            if self.engine == "sglang":
                from mismatch_ext.adapters.sglang.doctor import SglangEngine
                from mismatch_ext.adapters.sglang.doctor_requests import SEED

                seed = int(self.sampling.get(SEED, 0))
                return SglangEngine(folder, dtype=self.dtype, shape=shape, arguments=self.arguments, seed=seed)
            from mismatch_ext.adapters.vllm.doctor import VllmEngine

            return VllmEngine(folder, dtype=self.dtype, shape=shape, arguments=self.arguments)

    def mended(self, settings: Sequence[str]) -> Run:
        """Return the run with the trainer's own checkpoint in the engine, and without some of its settings.

        Args:
            settings: Names of the engine's arguments that are taken back.
        """
        kept = {key: value for key, value in self.arguments.items() if key not in settings}
        return replace(self, engine_model=None, arguments=kept)
