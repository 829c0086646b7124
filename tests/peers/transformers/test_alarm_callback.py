"""What transformers logs of losses while its alarms are ours."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mismatch_ext.adapters.transformers.alarms import AlarmCallback
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments


class Broken(nn.Module):
    """A model whose loss is 1, and NaN in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(())), 0

    def forward(self, x: Tensor, **_: Any) -> dict[str, Tensor]:
        self.calls += 1
        return {"loss": 0 * self.weight + (math.nan if self.calls == 3 else 1.0)}


def test_a_loss_that_is_not_finite_is_logged_once(tmp_path: Path) -> None:
    seen: list[float] = []
    watched = SimpleNamespace(
        checks=SimpleNamespace(acts=True),
        watch=lambda step, logs: seen.append(logs["loss"]),
        raised=dict,
        shown=lambda logs: logs,
    )
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=1, max_steps=5, logging_steps=1, learning_rate=0.0, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Broken(), arguments, train_dataset=[{"x": torch.ones(1)}] * 5)
    AlarmCallback(lambda: watched).install(trainer)
    ended = trainer.train()
    assert seen[:2] == seen[3:] == [1.0, 1.0] and math.isnan(seen[2])
    assert ended.training_loss == 4 / 5
    assert arguments.logging_nan_inf_filter
