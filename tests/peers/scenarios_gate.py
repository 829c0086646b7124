"""`mismatch-ext gate` on the shipped models, in one process."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mismatch_ext.adapters import cli
from mismatch_ext.adapters.vllm import weights
from mismatch_ext.adapters.vllm.doctor import VllmEngine

from examples.arithmetic.shipped import FOLDER

RUNS: dict[str, list[str]] = {
    "bfloat16": [],
    "float32": ["--dtype", "float32"],
    "lost": [],
    "temperature": ["--sampling", "temperature=0.9"],
    "stale head": ["--dtype", "float32"],
}


def without_a_layer(engine: VllmEngine, model: Any) -> None:
    """Send all weights but those of one layer's MLP."""
    weights.update_weights(
        engine._llm, [(name, w) for name, w in model.named_parameters() if "layers.2.mlp" not in name]
    )


def planted(name: str) -> AbstractContextManager[Any]:
    """Plant the fault of a run."""
    if name == "lost":
        return patch.object(VllmEngine, "update", without_a_layer)
    if name == "stale head":
        return patch.object(weights, "repack_tied_heads", lambda model: None)
    return nullcontext()


def gated(out: str, names: list[str], model: str | None = None, more: Sequence[str] = ()) -> dict[str, Any]:
    """Return the exit status, the page and the JSON of some runs, with more arguments; of another model if one is given."""
    found = {}
    for name in names:
        log, figures = Path(out) / f"{name}.txt", Path(out) / name / "gate.json"
        words = [
            "gate",
            "--model",
            model or str(FOLDER / "dense"),
            "--prompts",
            "examples/doctor/prompts.jsonl",
            "--quick",
        ]
        words += ["--engine-arg", "max_model_len=256", "--max-tokens", "64", "--json", str(figures)]
        with log.open("w", encoding="utf-8") as printed, redirect_stdout(printed), planted(name):
            status = cli.main([*words, *RUNS[name], *more])
        data = json.loads(figures.read_text(encoding="utf-8"))
        found[name] = {"status": status, "page": log.read_text(encoding="utf-8"), **data}
    return found
