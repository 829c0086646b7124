"""Runs of a real trainer, each in a process and a folder of its own; one that is there already is not run again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from benchmarks.harness import be_quiet
from benchmarks.stability.record import Runs

FINISHED = "run.json"
Train = Callable[..., dict[str, list[float]]]


def read(folder: Path, arms: Iterable[str]) -> Runs:
    """Return the finished runs of a folder, by arm and seed."""
    runs: Runs = {}
    for file in sorted(folder.glob(f"*/{FINISHED}")):
        one = json.loads(file.read_text(encoding="utf-8"))
        runs.setdefault(one["arm"], {})[one["seed"]] = one["curves"]
    return {name: dict(sorted(runs[name].items())) for name in arms if name in runs}


def run_apart(context: BaseContext, train: Train, folder: Path, name: str, arm: Any, seed: int, *given: Any) -> None:
    """Train one run in a process of its own, unless it has been.

    Args:
        context: How processes are started.
        train: Takes the arm, the seed, what is given besides, and the run's folder.
        folder: Of all runs.
        name: The arm's.
        arm: The arm.
        seed: The run's.
        given: Of `train`.

    Raises:
        SystemExit: It failed; names its log.
    """
    out = folder / f"{name.replace(' ', '_')}-{seed}"
    if (out / FINISHED).is_file():
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    process = context.Process(target=_quietly, args=(train, name, arm, seed, given, out))  # type: ignore[attr-defined]
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"{out.name} ended with exit code {process.exitcode}; see {out / 'log.txt'}")


def _quietly(train: Train, name: str, arm: Any, seed: int, given: tuple[Any, ...], out: Path) -> None:
    """Train with what is printed kept in the run's folder."""
    import torch

    torch.set_num_threads(1)
    be_quiet(out)
    curves = train(arm, seed, *given, out)
    (out / FINISHED).write_text(json.dumps({"arm": name, "seed": seed, "curves": curves}), encoding="utf-8")
