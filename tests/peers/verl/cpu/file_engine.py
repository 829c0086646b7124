"""A checkpoint engine for one node without GPUs: verl's own send weights between GPUs, and here they go through a file.

Loaded by `checkpoint_engine.custom_backend_module`, and chosen by `checkpoint_engine.backend=cpu_file`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("cpu_file")
class FileEngine(CheckpointEngine):
    """One file for each weight update, in the run's own folder."""

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        self._is_master = is_master

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_world: int, rollout_world: int, metadata: Any
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        return {"rank": list(range(actor_world))}, {"rank": list(range(rollout_world))}

    def init_process_group(self, rank: int) -> None:
        pass

    def finalize(self) -> None:
        pass

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, int]:
        state = {name: weight.detach().clone() for name, weight in weights}
        if self._is_master:
            path = _path(global_steps)
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
        return {"cpu_file/tensors": len(state)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while not (path := _path(global_steps)).exists():
            await asyncio.sleep(0.05)
        for name, weight in torch.load(path).items():
            yield name, weight


def _path(step: int | None) -> Path:
    return Path(os.environ["RAY_TMPDIR"]) / f"weights-{step}.pt"
