"""Runs scenarios in forks of a process that has imported the peers: importing them takes longer than most scenarios do.

`python -m tests.peers.forks MODULE NAME '{json}'` runs one by itself and prints what it returns. Nothing here computes with
torch before a fork: its OpenMP would have threads, which a fork does not.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any


def serve(descriptor: int) -> None:
    """Fork for each request that comes over a socket, until it is closed; answer with the fork's id, and its code at its end.

    Args:
        descriptor: The socket's.
    """
    channel = socket.socket(fileno=descriptor)
    for line in channel.makefile("r"):
        request = json.loads(line)
        # One that cannot be imported says why in the fork, which imports it again.
        with contextlib.suppress(Exception):
            importlib.import_module(request["module"])
        gc.freeze()  # what is collected in a fork is not written to in each
        sys.stdout.flush()
        sys.stderr.flush()
        if not (fork := os.fork()):
            channel.detach()
            os.close(descriptor)
            _run(**request)
        channel.sendall(b"%d\n" % fork)
        ended = os.pidfd_open(fork)
        readable, _, _ = select.select([channel, ended], [], [])
        os.close(ended)
        if channel in readable:  # closed: whoever asked has gone, or has waited long enough
            with contextlib.suppress(ProcessLookupError):
                os.killpg(fork, signal.SIGKILL)
            return
        channel.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))


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
    """Be the fork."""
    os.setsid()
    os.environ.update(variables)
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder, stream), os.O_WRONLY | os.O_CREAT), descriptor)
    _own_threads()
    _call(module, name, payload, Path(folder, "result"))


def _own_threads() -> None:
    """Make torch's thread pool anew while this fork has one thread: of two that come first at once, one finds none and aborts."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(torch.get_num_threads())


def _jsonable(value: Any) -> Any:
    """Return numpy's arrays and numbers as lists and numbers, and whatever else JSON does not know as text."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.tolist()
    return str(value)


def _call(module: str, name: str, payload: str, file: Path | None = None) -> None:
    """Call a function, write what it returns to a file, or print it, and end this process."""
    code = 0
    try:
        result = json.dumps(getattr(importlib.import_module(module), name)(**json.loads(payload)), default=_jsonable)
        print(result) if file is None else file.write_text(result)
    except BaseException:  # noqa: BLE001  (of whatever kind it is, it is what the scenario ended with)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    _end(code)


def _run_rank(function: Callable[..., Any], payload: dict[str, Any], rank: int, world: int, file: Path) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in names.items()})
    _own_threads()
    code = 0
    try:
        file.write_text(json.dumps(function(**payload), default=_jsonable))
    except BaseException:  # noqa: BLE001  (an engine's threads would keep this rank, and the other one would wait for it)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    _end(code)


def _end(code: int = 0) -> None:
    """Leave without what libraries do at exit: engines' threads may go on, a process group waits for ranks that have left."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(int(sys.argv[1]))
    else:
        _call(*sys.argv[1:4], *map(Path, sys.argv[4:]))
