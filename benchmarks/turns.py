"""Two trainers in processes of their own that take turns by single steps.

A machine that slows down then slows both, and nothing runs beside a step that is timed.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from transformers import TrainerCallback

WARM_UP = 2
Step = dict[str, Any]
"""`clock` and `processor` seconds of a step, and what it `learned`: tokens, reward, loss and gradient norm."""


class TakesTurns(TrainerCallback):
    """Waits for its turn before each step, and reports what the step took, logging and checks included."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.began = 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the step before, and wait."""
        self._report(state)
        self.pipe.recv()
        self.began = time.perf_counter(), time.process_time()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the last step."""
        self._report(state)

    def _report(self, state: Any) -> None:
        clock, processor = self.began
        logs = next((entry for entry in reversed(state.log_history) if "loss" in entry), {})
        learned = {name: logs.get(name) for name in ("num_tokens", "reward", "loss", "grad_norm")}
        spent = {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}
        self.pipe.send({**spent, "learned": learned})


def take_turns(
    steps: int,
    train: Callable[..., None],
    given: dict[str, tuple[Any, ...]],
    beside: Callable[[str], float] | None = None,
) -> list[tuple[Step, Step]]:
    """Let two trainers take turns, and return the steps of "ours" and "theirs", pair by pair, without those of the warm-up.

    Args:
        steps: How many each takes.
        train: What a process runs, with a `TakesTurns` over the pipe that it is given last.
        given: Arguments of `train` before the pipe, by "ours" and "theirs".
        beside: Returns the processor seconds so far of what else works for one of them, such as its server.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    taken: dict[str, list[Step]] = {"theirs": [], "ours": []}
    with ExitStack() as standing:
        for kind in taken:
            pipes[kind], there = context.Pipe()
            child = context.Process(target=train, args=(*given[kind], there), daemon=True)
            child.start()
            there.close()
            standing.callback(pipes[kind].close)  # a process whose partner has failed would wait for ever
            pipes[kind].recv()  # it is built and waits for its first turn
        for step in range(steps):
            for kind in ("ours", "theirs") if step % 2 else ("theirs", "ours"):
                before = beside(kind) if beside else 0.0
                pipes[kind].send("go")
                told = pipes[kind].recv()
                told["processor"] += (beside(kind) if beside else 0.0) - before
                taken[kind].append(told)
    return list(zip(taken["ours"], taken["theirs"], strict=True))[WARM_UP:]


def tokens_per_step(pairs: list[tuple[Step, Step]]) -> float:
    """Return the mean number of tokens of a step."""
    counts = [ours["learned"]["num_tokens"] for ours, _ in pairs]
    return float(counts[-1] - counts[0]) / (len(counts) - 1)
