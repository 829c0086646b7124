"""Runs scenarios in forks of one process that has imported them: importing verl takes longer than most scenarios do.

`python -m tests.peers.forks MODULE NAME '{json}'` runs one by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def serve(modules: Iterable[str]) -> None:
    """Start the process that is forked, once per process of pytest; it has imported these modules."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    # It finds the modules from its working directory.
    with contextlib.chdir(ROOT):
        forkserver.ensure_running()


def run_forked(
    module: str, name: str, payload: dict[str, Any], variables: dict[str, str], timeout: float
) -> tuple[int, Any, str, str]:
    """Run a function of a module in a fork, and return exit code, result, and what it wrote to both streams.

    A fork that is killed has the negative number of the signal as its code, and None as its result.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps(payload, default=str)
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(module, name, given, variables, folder)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has forked
            process.join()
            raise TimeoutError(f"{module}.{name} still runs after {timeout:g} s:\n{_text(folder, 'stderr')[-3000:]}")
        result = _text(folder, "result")
        return (
            process.exitcode, json.loads(result) if result else None, _text(folder, "stdout"), _text(folder, "stderr")
        )  # fmt: skip


def on_ranks(function: Callable[..., Any], world: int, limit: float = 150, **payload: Any) -> list[Any]:
    """Run a function on several ranks over gloo, each a fork of this process; one that fails ends the others.

    Args:
        function: What every rank runs.
        world: How many ranks.
        limit: Seconds they may take.
        payload: The function's arguments.

    Returns:
        What each rank returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        files = [Path(folder, f"{rank}.json") for rank in range(world)]
        ranks = [
            context.Process(target=_run_rank, args=(function, payload, rank, world, file))
            for rank, file in enumerate(files)
        ]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + limit
        running = list(ranks)
        try:
            while running:
                if not connection.wait([rank.sentinel for rank in running], max(0.0, end - time.monotonic())):
                    raise TimeoutError(
                        f"{len(running)} of {world} ranks still run {function.__name__} after {limit} s."
                    )
                running = [rank for rank in running if rank.exitcode is None]
                codes = [rank.exitcode for rank in ranks]
                if any(codes):
                    raise RuntimeError(f"ranks that ran {function.__name__} ended with {codes}.")
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return [json.loads(file.read_text()) for file in files]


def _run(module: str, name: str, payload: str, variables: dict[str, str], folder: str) -> None:
    os.setsid()
    os.environ.update(variables)
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, stream), os.O_WRONLY | os.O_CREAT), descriptor)
    result = getattr(importlib.import_module(module), name)(**json.loads(payload))
    Path(folder, "result").write_text(json.dumps(result, default=str))
    _end()


def _run_rank(function: Callable[..., Any], payload: dict[str, Any], rank: int, world: int, file: Path) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in names.items()})
    file.write_text(json.dumps(function(**payload), default=str))
    _end()


def _end() -> None:
    """Leave without what libraries do at exit: a process group waits for ranks that have left already."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _text(folder: str, name: str) -> str:
    file = Path(folder, name)
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    print(
        json.dumps(getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(**json.loads(sys.argv[3])), default=str)
    )
