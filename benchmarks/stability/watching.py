"""What runs of TRL's trainers share: a reward, what is kept of their log, and weights that are others while they are sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import TrainerCallback

LENGTH = "length"


class Shorter:
    """Reward minus the length of a response.

    Args:
        longest: Length whose reward is -1.
    """

    __name__ = "lengths"  # by which TRL logs it

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return the reward of each response."""
        return [-len(ids) / self._longest for ids in completion_ids]


class Curves(TrainerCallback):
    """Keeps what a run logs, and ends it when responses are short.

    Args:
        logged: What is kept, by the names of the miniature's measures.
        short: Mean length that three steps in a row have to reach.
        unit: What a length of 1 is logged as.

    Attributes:
        curves: What was kept.
    """

    def __init__(self, logged: Mapping[str, str], short: float, unit: float = 1.0) -> None:
        self._logged, self._short, self._unit = logged, short, unit
        self.curves: dict[str, list[float]] = {name: [] for name in logged}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep what a step logged."""
        if "loss" not in logs:
            return
        for name, logged in self._logged.items():
            value = logs.get(logged)
            self.curves[name].append(
                math.nan if value is None else float(value) / (self._unit if name == LENGTH else 1)
            )
        last = self.curves[LENGTH]
        if len(last) > 6 and max(last[-3:]) <= self._short:
            control.should_training_stop = True


def sent_within(trainer: Any, changed: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Let a trainer's weights be others while they are sent to its engine.

    Args:
        trainer: TRL's, with vLLM.
        changed: Returns the context in which a model has these weights.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    send: Callable[[], Any] = trainer.vllm_generation.sync_weights

    def sync() -> Any:
        with changed(model):
            return send()

    trainer.vllm_generation.sync_weights = sync
