"""A run's two sides, as the doctor starts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from mismatch_ext.adapters.doctor.asking import ToSample
    from mismatch_ext.adapters.doctor.server import Address

    from mismatch_ext.doctor import Sample
    from mismatch_ext.precision.audit import EngineReading
    from mismatch_ext.routing import RoutingShape


class DoctorsEngine(Protocol):
    """An engine that the doctor asks about tokens."""

    def sample(self, asked: ToSample) -> Sample:
        """Sample responses as the run does.

        Args:
            asked: Prompts and settings; the settings have the engine's names.
        """

    def score(self, sample: Sample) -> Sample:
        """Return the same tokens with the log-probabilities that the engine gives them as part of a prompt, at temperature 1."""

    def shutdown(self) -> None:
        """End all processes that were started for the engine."""


@runtime_checkable
class ReadBack(Protocol):
    """An engine whose dtypes are read back from it after its start."""

    reading: EngineReading


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings that a run's two sides are started with.

    Args:
        model: Checkpoint that the trainer holds, or the adapter that it trains.
        engine_model: Checkpoint or adapter that the engine serves, an adapter merged; None if it serves `model`.
        dtype: The engine's compute dtype.
        trainer_dtype: The trainer's compute dtype, under autocast unless it is float32.
        trainer_weights: Dtype that the trainer holds or gathers its weights in while it computes.
        trainer_config: Values of the trainer's model configuration that replace those of the checkpoint.
        replays: Whether the trainer replays the engine's expert routes.
        temperature: Temperature that the trainer divides logits by.
        sampling: Arguments of the engine's sampling.
        arguments: Arguments of the engine.
        older: Checkpoints or adapters whose weights the engine may have kept.
        engine: Kind of the engine, "vllm" or "sglang"; `sampling` and `arguments` have this engine's names.
        server: A server to ask; None starts an engine instead.
        layout: How the trainer lays sequences into a batch: right, left, left-positions or packed.
        head: Compute dtype of the trainer's head if it differs from the rest: float32; "" if it does not.
        attention: Name of the trainer's attention implementation; "" for the one that transformers takes.
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
    attention: str = ""

    def start(self, shape: RoutingShape | None, lengths: Sequence[int] = ()) -> DoctorsEngine:
        """Start the engine of this run, or connect to its server.

        Args:
            shape: Shape of the routes that the engine is to record; None for a model without experts.
            lengths: Number of tokens of each sequence that the engine has to hold at a time; empty if that is not known.
        """
        if self.server is not None:
            from mismatch_ext.adapters.doctor.server import connect, engine_of

            return engine_of(connect(self.server), shape)
        from mismatch_ext.adapters.transformers.peft_adapters import served

        option = "--model" if self.engine_model is None else "--engine-model"
        # An adapter is merged into a temporary folder, which is removed after the engine has loaded it.
        with served(self.engine_model or self.model, option) as folder:
            if self.engine == "sglang":
                from mismatch_ext.adapters.sglang.doctor import SEED, SglangEngine

                seed = int(self.sampling.get(SEED, 0))
                return SglangEngine(folder, dtype=self.dtype, shape=shape, arguments=self.arguments, seed=seed)
            from mismatch_ext.adapters.vllm.doctor import VllmEngine

            return VllmEngine(folder, dtype=self.dtype, shape=shape, arguments=self.arguments, lengths=lengths)

    def mended(self, settings: Sequence[str]) -> Run:
        """Return the run with the trainer's own checkpoint in the engine, and without some of the engine's arguments.

        Args:
            settings: Names of the arguments that are removed.
        """
        arguments = {key: value for key, value in self.arguments.items() if key not in settings}
        return replace(self, engine_model=None, arguments=arguments)


def in_live_dtype(sides: Run, live: str) -> tuple[Run, tuple[str, ...]]:
    """Return a run with the dtype that its engine computes in, and a note if another one was asked for.

    Args:
        sides: The run.
        live: The engine's dtype, read back from it.
    """
    if live == sides.dtype:
        return sides, ()
    note = f"the engine computes in {live}, and {sides.dtype} was asked for: it is judged in {live}"
    return replace(sides, dtype=live), (note,)
