"""`mismatch-ext doctor` with a real SGLang on the shipped dense model, in the environment that has it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.examining import examine
from mismatch_ext.adapters.doctor.sides import Run

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import encode
from mismatch_ext.errors import MismatchError


def examined() -> dict[str, Any]:
    """Return what the doctor says of a clean run and of a fault, what is refused, and whether two equal requests drew alike."""
    handlers = [signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)]
    prompts = [encode(row["prompt"]) for row in make_dataset(96, seed=5000)]
    # A scheduler that waits would take a core from the trainer's side.
    run = Run(
        model=str(FOLDER / "dense"), engine="sglang", sampling={"sampling_seed": 0}, arguments={"sleep_on_idle": True}
    )
    runs = {"clean": run, "fault": replace(run, sampling={"temperature": 0.9, "sampling_seed": 0})}
    found: dict[str, Any] = {
        name: examine(one, prompts, responses=96, max_tokens=112, quick=True).data() for name, one in runs.items()
    }
    engine: Any = run.start(None)
    twice = engine.sample(ToSample(prompts=[prompts[0]] * 2, responses=32, max_tokens=16, sampling=run.sampling))
    found["different"] = len(set(twice.responses))
    found["refused"] = {
        name: _refusal(engine, asked, sampling)
        for name, asked, sampling in (("unknown", prompts[:2], {"seed": 1}), ("long", [[3] * 600] * 2, {}))
    }
    # A scheduler that is killed, as for want of memory, ends the request that waits for it.
    scheduler, *_ = engine._transport.engine.get_all_child_pids()
    with _killed_soon(scheduler):
        found["refused"]["killed"] = _refusal(engine, prompts * 8, {"min_new_tokens": 100})
    engine.shutdown()
    found["restored"] = handlers == [signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)]
    return found


@contextmanager
def _killed_soon(process: int) -> Iterator[None]:
    """Kill a process a second after the block begins."""
    import threading

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    timer = threading.Timer(1.0, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _refusal(engine: Any, prompts: list[list[int]], sampling: dict[str, Any]) -> str:
    try:
        engine.sample(ToSample(prompts=prompts, responses=len(prompts), max_tokens=112, sampling=sampling))
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
