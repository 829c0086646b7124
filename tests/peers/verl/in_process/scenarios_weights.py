"""Weight updates that are verified without Ray: made-up servers that answer, are too slow, or have other weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters.verl.driver import processes, servers, weights
from mismatch_ext.adapters.verl.driver.reports import RolloutAnswer
from ray.exceptions import GetTimeoutError
from torch import Tensor

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import EngineError
from mismatch_ext.rollout import Origins, SamplingSettings
from mismatch_ext.weights import Decoded
from tests.peers.verl.in_process.routes import refused
from tests.peers.verl.recorded import recorded

PROBES = torch.arange(8 * 32).reshape(8, 32) % 13


class Server:
    """A rollout server whose log-probabilities follow from its weights, one number."""

    def __init__(self, held: float = 0.0, policy: str = "fcfs") -> None:
        self.held, self.slow = held, False
        self.asleep, self.read = False, list[bool]()  # whether it was asleep each time its weights were read
        self.config = SimpleNamespace(name="vllm", scheduling_policy=policy)
        self.gate = threading.Event()
        self.gate.set()

    def scores(self, tokens: Tensor) -> Tensor:
        return -1.0 - self.held - 0.01 * tokens[:, 1:].double()


class Workers:
    """The actor's ranks, each with weights of its own, one number."""

    def __init__(self, ranks: int = 1) -> None:
        self.held = [0.0] * ranks

    def mismatch_look(self, tokens: list[list[int]], dtype: str) -> list[dict[str, Any]]:
        ids = torch.tensor(tokens)
        return [
            {"logprobs": Server(held).scores(ids).tolist(), "fingerprint": str(held), "sums": {}, "shapes": {}}
            for held in self.held
        ]


def _answer(server: Server) -> None:
    server.gate.wait(30)
    if server.slow:
        raise EngineError("the rollout server could not score probe tokens: GetTimeoutError")


def _decoded(pending: Any, prompts: Any, timeout: float) -> Decoded:
    server, count = pending
    _answer(server)
    ids = torch.tensor(prompts)
    tokens = torch.cat([ids, ids[:, :count]], 1)
    return Decoded(tokens=tokens, logprobs=server.scores(tokens)[:, -count:])


def _scored(pending: Any, timeout: float) -> Tensor:
    server, tokens = pending
    _answer(server)
    return server.scores(torch.tensor(tokens))


def _asked_sums(server: Server, *_: Any) -> list[Any]:
    server.read.append(server.asleep)
    return []


@contextmanager
def verifying(
    found: Callable[[], list[Server]], workers: Workers, dtypes: tuple[str, str] = ("float32", "float32"), **given: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """Give the check of weight updates of these servers, and what it says."""
    said: list[Any] = []
    with mock.patch.multiple(
        weights,
        ask_decode=lambda server, prompts, count: (server, count),
        answered_decode=_decoded,
        ask_probes=lambda server, tokens: (server, tokens),
        answered=_scored,
        ask_sums=_asked_sums,
        answered_sums=lambda *asked: [],
    ):
        checked = weights.RolloutWeights(
            workers, found, MonitorConfig(weight_sync="error"), PROBES,
            dtype=dtypes[0], trainer_dtype=dtypes[1], event=lambda *event: said.append(event), **given,
        )  # fmt: skip
        yield checked, said


def updated(checked: Any, workers: Workers, held: float, *servers: Server, sent: float | None = None) -> str:
    """Move the actor's weights, send them, and verify; return what was raised."""
    workers.held = [held] * len(workers.held)

    def update() -> None:
        checked.settle()
        checked.look()
        for server in servers:
            server.held = held if sent is None else sent
        checked.verify(stepped=True)

    return refused(update)


NOTHING = "nothing was refused"
UNKNOWN = ("warning", "weight_sync_unanswered")


def kinds(said: list[Any]) -> list[tuple[str, str]]:
    """Return level and name of events."""
    return [(level, name) for level, name, *_ in said]


def too_slow() -> None:
    """Verify updates of two servers of which one does not answer three times in a row; the other one is then garbled."""
    fast, slow = Server(), Server()
    workers = Workers()
    with verifying(lambda: [fast, slow], workers) as (checked, said):
        assert updated(checked, workers, 0.1, fast, slow) == NOTHING
        slow.slow = True
        for step in (2, 3, 4):
            assert updated(checked, workers, 0.1 * step, fast, slow) == NOTHING
        assert kinds(said) == [UNKNOWN] * 3 and checked.unanswered == 3 and checked.gap < 1e-9
        slow.slow = False
        assert updated(checked, workers, 0.5, fast, slow) == NOTHING
        assert checked.unanswered == 0 and checked.gap < 1e-9
        slow.slow = True
        assert updated(checked, workers, 0.51, fast, slow, sent=50.0).startswith("WeightSyncError: ")
        assert kinds(said)[3:] == [("error", "weight_sync"), UNKNOWN]


def with_priorities() -> None:
    """Verify an update while requests run, by an engine that takes probes first: it is judged at once."""
    server, workers = Server(policy="priority"), Workers()
    with verifying(lambda: [server], workers, in_flight=True) as (checked, said):
        assert updated(checked, workers, 0.1, server) == NOTHING
        assert checked.gap is not None and said == []


def in_flight() -> None:
    """Verify updates while requests run, by an engine without priorities: each is judged before the next one."""
    server, workers = Server(), Workers()
    with verifying(lambda: [server], workers, in_flight=True) as (checked, said):
        assert updated(checked, workers, 0.1, server) == NOTHING and checked.gap is None
        _until_answered(checked)
        server.gate.clear()  # all slots are taken until after the next update
        assert updated(checked, workers, 0.2, server) == NOTHING
        assert checked._pending is not None
        assert updated(checked, workers, 0.3, server) == NOTHING
        server.gate.set()
        _until_answered(checked)
        assert updated(checked, workers, 0.31, server, sent=50.0) == NOTHING
        _until_answered(checked)
        assert refused(checked.settle).startswith("WeightSyncError: ")
        assert refused(checked.look) == NOTHING
        # The answer came after the next update, so nothing is known; then the garbled one is found before the one after it.
        assert kinds(said) == [UNKNOWN, ("error", "weight_sync")]
        # A run that only measures goes on: its next update is judged, by the end of training at the latest.
        server.held = 0.31
        assert refused(lambda: checked.verify(stepped=True)) == NOTHING
        assert refused(lambda: checked.settle(wait=30)) == NOTHING and checked.gap < 1e-9


def _until_answered(checked: Any) -> None:
    for thread in threading.enumerate():
        if thread.name == "mismatch-probes":
            thread.join(30)


def one_silent() -> None:
    """Verify updates by two servers that answer in the background, of which the first one has stopped answering."""
    silent, fast = Server(), Server()
    workers = Workers()
    with verifying(lambda: [silent, fast], workers, in_flight=True) as (checked, said):
        assert updated(checked, workers, 0.1, silent, fast) == NOTHING
        _until_answered(checked)
        silent.gate.clear()
        for held in (0.2, 0.3):
            assert updated(checked, workers, held, silent, fast) == NOTHING
            checked._pending.questions[1].join(30)
        assert refused(checked.settle) == NOTHING
        unknown, judged = (one.verdict for one in checked._verifiers)
        assert unknown is None and judged.gap_mean < 1e-9
        assert updated(checked, workers, 0.31, silent, fast, sent=50.0) == NOTHING
        checked._pending.questions[1].join(30)
        assert refused(checked.settle).startswith("WeightSyncError: weight update 4: garbled.")
        silent.gate.set()
    assert kinds(said) == [UNKNOWN] * 3 + [("error", "weight_sync")]


def elastic() -> None:
    """Add a server between two updates, let it hold garbled weights after one, and remove the first."""
    first, second = Server(), Server()
    running, workers = [first], Workers()
    with verifying(lambda: running, workers) as (checked, said):
        assert updated(checked, workers, 0.1, first) == NOTHING
        before = checked._verifiers[0]
        running.append(second)
        assert updated(checked, workers, 0.2, first, second) == NOTHING
        assert checked._verifiers[0] is before and len(checked._verifiers) == 2
        second.held = 50.0
        assert updated(checked, workers, 0.3, first).startswith("WeightSyncError: ")
        running.remove(first)
        assert updated(checked, workers, 0.4, second) == NOTHING
        assert len(checked._verifiers) == 1
    ((_, name, message),) = [event for event in said if event[0] == "error"]
    assert name == "weight_sync" and message.startswith("rollout server 1: ")


def parted() -> None:
    """Look at an actor of three ranks of which the last has other weights."""
    words = "WeightSyncError: the actor's rank 2 scores probe tokens"
    server, workers = Server(), Workers(3)
    with verifying(lambda: [server], workers) as (checked, said):
        assert refused(checked.look) == NOTHING
        workers.held[2] = 0.5
        assert refused(checked.look).startswith(f"{words} 0.5 nats from rank 0")
        assert kinds(said) == [("error", "weight_sync")]
    # The last rank differs by 0.04 nats at first, which is this model's rounding in bfloat16.
    server, workers = Server(), Workers(3)
    with verifying(lambda: [server], workers, dtypes=("bfloat16", "bfloat16")) as (checked, said):
        for held in (0.04, 0.05):
            workers.held[2] = held
            assert refused(checked.look) == NOTHING
        for held, nats in ((0.6, "0.6"), (float("nan"), "inf")):
            workers.held[2] = held
            assert refused(checked.look).startswith(f"{words} {nats} nats from rank 0")


def followed() -> None:
    """Follow the weights of a server that is asked once, by its own answer or a failure."""
    report = recorded("dense")["rollouts"][0]["reports"][0] | {"weight_version": 0}
    for failure, expected in (
        (GetTimeoutError("not within 120 s"), "EngineError: rollout server 0 does not say what it runs with"),
        (None, NOTHING),
    ):
        run: Any = object.__new__(processes.Processes)
        run.origins, answers = Origins(SamplingSettings()), [RolloutAnswer(engine="vllm", expected=1, reports=[report])]
        asked = [answers if failure is None else [RolloutAnswer(engine="vllm", expected=1, failure=failure)]]
        run._read = asked.pop
        assert refused(run.follow_weights, 0).startswith(expected)
        if failure is None:
            run.follow_weights(1)
            assert run.origins.present.weight_version == 1


def asked_first() -> list[Any]:
    """Return with which priority a server is asked, by its scheduling policy."""
    found = []
    for policy in ("priority", "fcfs"):
        given: list[dict[str, Any]] = []
        generate = SimpleNamespace(remote=lambda given=given, **call: given.append(call))
        replica = SimpleNamespace(
            servers=[SimpleNamespace(generate=generate)], config=SimpleNamespace(name="vllm", scheduling_policy=policy)
        )
        servers.ask_probes(replica, [[1, 2]])
        servers.ask_decode(replica, [[1, 2]], 1)
        found.append([call.get("priority") for call in given])
    return found
