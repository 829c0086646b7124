"""`mismatch-ext doctor` on the shipped dense model, in one process: a clean run, and faults of requests, decode and a layer."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from mismatch_ext.adapters import cli
from mismatch_ext.adapters.vllm.doctor import VllmEngine
from mismatch_ext.adapters.vllm.engine import runner

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset

RUNS: dict[str, list[str]] = {
    "clean": [],
    "fault": ["--sampling", "temperature=0.9"],
    "stale_decode": [],
    "wrong_layer": [],
}


@contextmanager
def planted(plant: Callable[[Any], None]) -> Iterator[None]:
    """Break the model of engines that start.

    Args:
        plant: Breaks the decoder that it is given.
    """
    start = VllmEngine.__init__

    def started(engine: VllmEngine, *args: Any, **kwargs: Any) -> None:
        start(engine, *args, **kwargs)
        plant(runner(engine._llm).model.model)

    with patch.object(VllmEngine, "__init__", started):
        yield


def scaled(output: Any, factor: float) -> Any:
    return tuple(part * factor for part in output) if isinstance(output, tuple) else output * factor


def stale_decode(decoder: Any) -> None:
    """Give the last norm other weights in steps that decode, as a captured graph may keep old ones."""
    from vllm.forward_context import get_forward_context

    other = 1 + 0.1 * torch.randn(decoder.norm.weight.shape, generator=torch.Generator().manual_seed(0))

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        metadata = get_forward_context().attn_metadata
        longest = max((layer.max_query_len for layer in metadata.values()), default=2) if metadata else 2
        return tuple((part * other).to(part.dtype) for part in output) if longest == 1 else None

    decoder.norm.register_forward_hook(hook)


def wrong_layer(decoder: Any) -> None:
    """Give layer 2 an MLP that says too much."""
    decoder.layers[2].mlp.register_forward_hook(lambda module, inputs, output: scaled(output, 1.2))


PLANTS = {"stale_decode": stale_decode, "wrong_layer": wrong_layer}


def examined(out: str) -> dict[str, Any]:
    """Return the exit status, what was printed and doctor.json of each run."""
    prompts = Path(out) / "prompts.txt"
    prompts.write_text("\n".join(row["prompt"] for row in make_dataset(96, seed=5000)), encoding="utf-8")
    # As the README has it.
    command = f"mismatch-ext doctor --model {FOLDER / 'dense'} --prompts {prompts} --out runs/doctor"
    less = ["--quick", "--responses", "96", "--engine-arg", "max_model_len=256"]
    found = {}
    for name, arguments in RUNS.items():
        folder = Path(out) / name
        # A file: vLLM asks standard output for its descriptor.
        log = Path(out) / f"{name}.txt"
        broken = planted(PLANTS[name]) if name in PLANTS else nullcontext()
        with log.open("w", encoding="utf-8") as printed, redirect_stdout(printed), broken:
            asked = shlex.split(command.replace("runs/doctor", str(folder)))
            status = cli.main([*asked[1:], *less, *arguments])
        data = json.loads((folder / "doctor.json").read_text(encoding="utf-8"))
        found[name] = {"status": status, "printed": log.read_text(encoding="utf-8"), **data}
    return found
