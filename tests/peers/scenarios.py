"""Scenarios of the tests with peers: functions that run in a process which has imported the peers, named without importing them.

A test file names a scenario module, and runs a function of it with the fixture `run`:

    scenarios = named("tests.peers.trl.scenarios_kl")

    run(scenarios.preset, model=dense, out=tmp_path).expect()
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AT_IMPORT = ("ATEN_", "ONEDNN_", "PYTHONPATH")
"""How variables begin that Python, torch and oneDNN read once, which a fork of a process that has them comes too late for."""
RUNNER = "tests.peers.forks"


@dataclass(frozen=True)
class Scenario:
    """A function of a scenario module, which is not imported here."""

    module: str
    name: str

    @property
    def __name__(self) -> str:
        """The function's name; pytest takes it for a parameter's id."""
        return self.name


class _Named:
    """Stands for a scenario module: its attributes name the functions that a process looks up when it runs them."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Scenario:
        return Scenario(self._module, name)


def named(module: str) -> Any:
    """Return what stands for a scenario module in a process that has not imported it."""
    return _Named(module)


@dataclass(frozen=True)
class Ran:
    """How a scenario ended; one that was killed has the negative number of the signal as its code."""

    code: int
    result: Any
    stdout: str
    stderr: str

    def expect(self) -> Any:
        """Return the result of a scenario that must have succeeded."""
        assert self.code == 0, f"{self.stdout[-1000:]}\n{self.stderr[-5000:]}"
        return self.result


Run = Callable[..., Ran]


def run_fresh(
    scenario: Scenario,
    payload: Mapping[str, Any],
    variables: Mapping[str, str],
    timeout: float,
    python: str | Path = sys.executable,
) -> Ran:
    """Run a scenario in a new interpreter.

    Args:
        scenario: The function.
        payload: Its arguments; what JSON has no form for arrives as a string.
        variables: The whole environment.
        timeout: Seconds it may take.
        python: The interpreter.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-m", RUNNER, scenario.module, scenario.name, json.dumps(payload, default=str)]
        with open(f"{folder}/stdout", "wb") as out, open(f"{folder}/stderr", "wb") as err:
            process = subprocess.Popen(
                [*command, f"{folder}/result"], cwd=ROOT, env=dict(variables), stdin=subprocess.DEVNULL, stdout=out,
                stderr=err, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired as error:
                raise _overdue(scenario, timeout, folder) from error
            finally:
                end_group(process.pid, 0 if process.returncode is None else 2)
                process.wait()
        return _ran(process.returncode, folder)


class Forks:
    """Processes that have imported the scenario modules of one package each, and fork for every scenario.

    A package's process starts with its first scenario and imports each module at that module's first scenario. It ends with
    this object, or with the process that made it.
    """

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}

    def run(self, scenario: Scenario, payload: Mapping[str, Any], variables: Mapping[str, str], timeout: float) -> Ran:
        """Run a scenario in a fork, whose environment gets the variables; arguments as for `run_fresh`.

        Raises:
            ValueError: A variable would have no effect in a fork.
        """
        for variable in variables:
            if variable.startswith(AT_IMPORT):
                raise ValueError(
                    f"{variable}={variables[variable]!r} for {scenario.module}.{scenario.name}: it was read before the fork, and "
                    "would have no effect; run the scenario with fresh=True."
                )
        package = scenario.module.rpartition(".")[0]
        if package not in self._servers:
            self._servers[package] = _Server()
        server = self._servers[package]
        with tempfile.TemporaryDirectory() as folder:
            given = {"payload": json.dumps(payload, default=str), "variables": dict(variables), "folder": folder}
            server.send({"module": scenario.module, "name": scenario.name, **given})
            try:
                pid = server.receive(timeout)
                code = server.receive(timeout)
            except BaseException as error:
                server.close()
                del self._servers[package]
                if isinstance(error, TimeoutError):
                    raise _overdue(scenario, timeout, folder) from error
                raise
            end_group(pid, 2)
            return _ran(code, folder)

    def close(self) -> None:
        """End all processes."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()


@dataclass
class _Server:
    """One process that forks, and the socket to it."""

    log: Any = field(default_factory=tempfile.TemporaryFile)

    def __post_init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", RUNNER, str(theirs.fileno())], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self.log,
            stderr=self.log, pass_fds=[theirs.fileno()], start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        theirs.close()
        self.pending = b""

    def send(self, request: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # `receive` says why
            self.channel.sendall(json.dumps(request).encode() + b"\n")

    def receive(self, timeout: float) -> int:
        while b"\n" not in self.pending:
            if not select.select([self.channel], [], [], timeout)[0]:
                raise TimeoutError
            if not (got := self.channel.recv(64)):
                self.log.seek(0)
                raise RuntimeError(f"the process that forks has ended:\n{self.log.read().decode()[-4000:]}")
            self.pending += got
        line, _, self.pending = self.pending.partition(b"\n")
        return int(line)

    def close(self) -> None:
        """End the process, which ends its fork when this end of the socket is closed."""
        self.channel.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def end_group(leader: int, grace: float) -> None:
    """Kill what is left of a process group after seconds of grace, in which the helpers of engines tidy up."""
    end = time.monotonic() + grace
    while _alive(leader):
        if time.monotonic() >= end:
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
            return
        time.sleep(0.02)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _overdue(scenario: Scenario, timeout: float, folder: str) -> TimeoutError:
    name = f"{scenario.module}.{scenario.name}"
    return TimeoutError(f"{name} still runs after {timeout:g} s:\n{_text(folder, 'stderr')[-3000:]}")


def _ran(code: int, folder: str) -> Ran:
    result = _text(folder, "result")
    return Ran(code, json.loads(result) if result else None, _text(folder, "stdout"), _text(folder, "stderr"))


def _text(folder: str, name: str) -> str:
    file = Path(folder, name)
    return file.read_text(errors="replace") if file.exists() else ""
