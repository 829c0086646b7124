"""`mismatch-ext doctor` with a real SGLang on the shipped dense model, in the environment that has it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from mismatch_ext.adapters import cli
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.examining import examine
from mismatch_ext.adapters.doctor.sides import DoctorsEngine, Run
from mismatch_ext.adapters.sglang.doctor import SglangEngine
from mismatch_ext.adapters.sglang.weights import update_weights
from mismatch_ext.adapters.transformers import checkpoint_parameters

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import encode
from mismatch_ext.doctor import Sample
from mismatch_ext.errors import MismatchError
from mismatch_ext.routing import RoutingShape


@dataclass(frozen=True, kw_only=True)
class OneEngine(Run):
    """A run whose engine serves the next run too, where that asks for the same one."""

    engines: ClassVar[dict[str, DoctorsEngine]] = {}

    def start(self, shape: RoutingShape | None, lengths: Sequence[int] = ()) -> DoctorsEngine:
        """Return the engine of these settings; no two run at once."""
        asked = repr((self.engine_model or self.model, self.dtype, sorted(self.arguments.items())))
        if asked not in self.engines:
            end()
            self.engines[asked] = super().start(shape, lengths)
        return Kept(self.engines[asked])


@dataclass
class Kept:
    """An engine that outlives a run."""

    engine: DoctorsEngine

    def sample(self, asked: ToSample) -> Sample:
        """Sample with it."""
        return self.engine.sample(asked)

    def score(self, sample: Sample) -> Sample:
        """Score with it."""
        return self.engine.score(sample)

    def shutdown(self) -> None:
        """Leave it for the next run."""


def end() -> None:
    """End the engine that runs."""
    for engine in OneEngine.engines.values():
        engine.shutdown()
    OneEngine.engines.clear()


def examined() -> dict[str, Any]:
    """Return what the doctor says of a clean run and of a fault, what two equal requests drew, and what is refused."""
    handlers = [signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)]
    prompts = [encode(row["prompt"]) for row in make_dataset(96, seed=5000)]
    # A scheduler that waits would take a core from the trainer's side.
    run = OneEngine(
        model=str(FOLDER / "dense"), engine="sglang", sampling={"sampling_seed": 0}, arguments={"sleep_on_idle": True}
    )
    runs = {"clean": run, "fault": replace(run, sampling={"temperature": 0.9, "sampling_seed": 0})}
    found: dict[str, Any] = {
        name: examine(one, prompts, responses=96, max_tokens=112, quick=True).data() for name, one in runs.items()
    }
    engine = run.start(None)
    twice = engine.sample(ToSample(prompts=[prompts[0]] * 2, responses=32, max_tokens=16, sampling=run.sampling))
    found["different"] = len(set(twice.responses))
    found["refused"] = {
        name: _refusal(engine, asked, sampling)
        for name, asked, sampling in (
            ("unknown", prompts[:2], {"seed": 1}),
            ("beyond", prompts[:2], {"top_p": 2.0}),
            ("ours", prompts[:2], {"max_new_tokens": 1}),
            ("long", [[3] * 600] * 2, {}),
        )
    }
    # A scheduler that is killed, as for want of memory, ends the request that waits for it.
    inner = engine.engine if isinstance(engine, Kept) else engine
    scheduler, *_ = inner._transport.engine.get_all_child_pids()  # type: ignore[attr-defined]
    with _killed_soon(scheduler):
        start = time.monotonic()
        found["refused"]["killed"] = _refusal(engine, prompts * 8, {"min_new_tokens": 100})
        found["waited"] = time.monotonic() - start
    end()
    found["restored"] = handlers == [signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)]
    return found


def without_a_layer(engine: SglangEngine, model: Any) -> None:
    """Send all weights but those of one layer's MLP."""
    sent = [(name, tensor) for name, tensor in checkpoint_parameters(model) if "layers.2.mlp" not in name]
    update_weights(engine._transport, sent, dtype=engine.reading.model_dtype)


def gated(out: str) -> dict[str, Any]:
    """Return the exit status, the page and the figures of `mismatch-ext gate`, clean and with a layer that no update brings."""
    found = {}
    for name, arguments in {"bfloat16": [], "float32": ["--dtype", "float32"], "lost": []}.items():
        log, figures = Path(out) / f"{name}.txt", Path(out) / f"{name}.json"
        words = [
            "gate",
            "--engine",
            "sglang",
            "--model",
            str(FOLDER / "dense"),
            "--prompts",
            "examples/doctor/prompts.jsonl",
        ]
        words += [
            "--quick",
            "--max-tokens",
            "64",
            "--engine-arg",
            "sleep_on_idle=true",
            "--json",
            str(figures),
            *arguments,
        ]
        lost = patch.object(SglangEngine, "update", without_a_layer) if name == "lost" else nullcontext()
        with log.open("w", encoding="utf-8") as printed, redirect_stdout(printed), lost:
            status = cli.main(words)
        found[name] = {"status": status, "page": log.read_text("utf-8"), **json.loads(figures.read_text("utf-8"))}
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


def _refusal(engine: DoctorsEngine, prompts: list[list[int]], sampling: dict[str, Any]) -> str:
    try:
        engine.sample(ToSample(prompts=prompts, responses=len(prompts), max_tokens=112, sampling=sampling))
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
