"""Two ranks of a loop, of which the second fails in each verb in turn; each prints what every verb raised."""

from __future__ import annotations

import dataclasses
import datetime
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mismatch_ext import Run
from mismatch_ext.ranks import WORLD, first_error, number_of_training
from mismatch_ext.rollout import Batch
from tests.unit.loops import PROMPTS, sides

BLOCK: dict[str, Any] = {
    "kl": {"coef": 0.1},
    "correction": {"preset": "token_truncate"},
    "lr": {"trigger": "mismatch_kl"},
}


def fail(words: str) -> Callable[..., Any]:
    """Return a function that raises an error that is not of this package."""

    def raises(*_: Any, **__: Any) -> Any:
        raise OSError(words)

    return raises


def one(name: str, fails: bool, folder: Path) -> str:
    """Take the step of a run up to the verb that is to fail, and return what it raised."""
    level = "observe" if name.startswith("observe") else "enforce"
    name = name.removeprefix("observe ")
    if fails and name == "init":
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.touch()
    trainer, rollout = sides()
    run = Run({"level": level, **BLOCK}, trainer, rollout, folder, ranks=WORLD)
    if fails and name == "start":
        rollout.check = fail("engine is gone")  # type: ignore[method-assign]
    with run.start():
        records = rollout.generate(PROMPTS)
        if fails and name == "batch":
            stale = dataclasses.replace(records[0].provenance, weight_version=7)
            records = [dataclasses.replace(record, provenance=stale) for record in records]
        batch: Batch = run.batch(records)
        if fails and name == "score":
            run.score = fail("out of memory in score")  # type: ignore[method-assign]
        if fails and name == "evaluate":
            run.batch([dataclasses.replace(record, provenance=None) for record in records], "eval/mine")
        with torch.no_grad():
            old, ref = run.score(batch), run.reference(batch)
        run.measure(batch, old=old, reference=None if fails and name == "measure" else ref)
        run.correct(batch, old[1:] if fails and name == "correct" else old)
        loss = run.score(batch).mean() + run.kl(batch, logprobs=run.score(batch), reference=ref).mean()
        if fails and name == "step":
            loss = loss.detach().requires_grad_()
        run.step(loss)
        if fails and name == "send":
            rollout.update = fail("no space on device")  # type: ignore[method-assign]
        if fails and name == "verify":
            rollout.drops_updates = True
            run._verifier.state = dataclasses.replace(run._verifier.state, doubted=(True,))  # type: ignore[union-attr]
        run.send()
        if fails and name == "write":
            run._log.write = fail("disk is full")  # type: ignore[method-assign]
        run.log(reward=object() if fails and name == "log" else 1.0)
        if fails and name == "save":
            (folder.parent / "saved").touch()
        run.save(folder.parent / "saved")
        run.log()
    return "nothing"


def after_another_failure(fails: bool) -> str:
    """Fail in a training after another in which this rank alone had failed, and return the words of the first rank to fail."""
    earlier = number_of_training(WORLD)
    if fails:
        first_error(OSError("of the training before"), earlier)
    training = number_of_training(WORLD)
    if not fails:
        first_error(OSError("disk is full"), training)
    dist.barrier()
    return first_error(OSError("connection lost"), training) if fails else "nothing"


def ended(folder: Path) -> str:
    """Return what the metrics file says of the run's end."""
    written = [path.read_text().splitlines()[-1] for path in folder.rglob("metrics-*.jsonl")] if folder.is_dir() else []
    return " ".join(written)


def main(rank: int, folder: Path, names: list[str]) -> None:
    """Let each verb fail on one rank."""
    warnings.simplefilter("ignore")
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2, timeout=limit)
    for number, name in enumerate(names):
        failing = 0 if name.split()[-1] in ("init", "write", "save") else 1  # files are written on rank 0
        if name == "fail again":
            print(f"{name}: {after_another_failure(rank == failing)}", flush=True)
            continue
        try:
            said = one(name, rank == failing, folder / str(number) / "run")
        except Exception as error:  # noqa: BLE001  # that is what is looked at
            notes = getattr(error, "__notes__", [])
            said = f"{type(error).__name__}: {error} {' '.join(notes)} {ended(folder / str(number) / 'run')}"
        print(f"{name}: {' '.join(said.split())}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
