"""Weight updates that are verified without Ray: made-up servers that answer, are too slow, or have other weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters.verl.driver import processes, servers, weights
from mismatch_ext.adapters.verl.driver.reports import RolloutAnswer
from ray.exceptions import GetTimeoutError, RayTaskError
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
        checked.look()
        for server in servers:
            server.held = held if sent is None else sent
        checked.verify(stepped=True)

    return refused(update)


def too_slow() -> dict[str, Any]:
    """Verify updates of two servers of which one does not answer three times in a row; then it answers again."""
    fast, slow = Server(), Server()
    workers = Workers()
    with verifying(lambda: [fast, slow], workers) as (checked, said):
        raised = [updated(checked, workers, 0.1, fast, slow)]
        slow.slow = True
        raised += [updated(checked, workers, 0.1 * step, fast, slow) for step in (2, 3, 4)]
        gap, unanswered = checked.gap, [checked.unanswered]
        slow.slow = False
        raised.append(updated(checked, workers, 0.5, fast, slow))
        unanswered.append(checked.unanswered)
    return {"raised": raised, "said": said, "gap": gap, "after": checked.gap, "unanswered": unanswered}


def wrong() -> dict[str, Any]:
    """Verify an update that one of two servers holds garbled while the other one is too slow."""
    garbled, slow = Server(), Server()
    workers = Workers()
    with verifying(lambda: [garbled, slow], workers) as (checked, said):
        raised = [updated(checked, workers, 0.1, garbled, slow)]
        slow.slow = True
        raised.append(updated(checked, workers, 0.11, garbled, slow, sent=50.0))
    return {"raised": raised, "said": said}


def in_flight() -> dict[str, Any]:
    """Verify updates while requests run, by engines with and without priorities: who is waited for, and when it is judged."""
    found: dict[str, Any] = {}
    for policy in ("priority", "fcfs"):
        server, workers = Server(policy=policy), Workers()
        with verifying(lambda server=server: [server], workers, in_flight=True) as (checked, said):
            raised = [updated(checked, workers, 0.1, server)]
            at_once = checked.gap is not None
            if policy == "fcfs":
                _until_answered(checked)
                server.gate.clear()  # all slots are taken until after the next update
                raised.append(updated(checked, workers, 0.2, server))
                waiting = checked._pending is not None
                raised.append(updated(checked, workers, 0.3, server))
                server.gate.set()
                _until_answered(checked)
                raised.append(updated(checked, workers, 0.31, server, sent=50.0))
                _until_answered(checked)
                raised.append(refused(checked.look))
                found["waiting"] = waiting
                # A run that only measures goes on: its next update is judged, by the end of training at the latest.
                found["goes on"] = checked._looked is not None
                server.held = 0.31
                raised.append(refused(lambda: checked.verify(stepped=True)))
                found["at the end"] = refused(lambda: checked.settle(wait=30))
                found["gap at the end"] = checked.gap
        found[policy] = {"raised": raised, "said": said, "at once": at_once}
    return found


def stopped() -> dict[str, Any]:
    """Let verl stop a server before it has answered; a list of other lengths must not be taken for an answer either."""
    outputs = [
        SimpleNamespace(stop_reason=reason, token_ids=[1, 2], log_probs=[-1.0, -1.0])
        for reason in ("completed", "aborted")
    ]
    short = [
        SimpleNamespace(stop_reason="completed", token_ids=ids, log_probs=[-1.0] * len(ids)) for ids in ([1, 2], [1])
    ]
    found: dict[str, Any] = {}
    for name, answers in (("aborted", outputs), ("short", short)):
        with mock.patch.object(servers, "_answers", lambda *_, answers=answers, **__: answers):
            found[name] = refused(lambda: servers.answered_decode([], [[1], [2]], 1.0))
    return found


def _until_answered(checked: Any) -> None:
    for thread in threading.enumerate():
        if thread.name == "mismatch-probes":
            thread.join(30)


def one_silent() -> dict[str, Any]:
    """Verify updates by two servers that answer in the background, of which the first one has stopped answering."""
    silent, fast = Server(), Server()
    workers = Workers()
    with verifying(lambda: [silent, fast], workers, in_flight=True) as (checked, said):
        raised = [updated(checked, workers, 0.1, silent, fast)]
        _until_answered(checked)
        silent.gate.clear()
        for held in (0.2, 0.3):
            raised.append(updated(checked, workers, held, silent, fast))
            checked._pending.questions[1].join(30)
        raised.append(refused(checked.settle))
        gaps = [None if one.verdict is None else one.verdict.gap_mean for one in checked._verifiers]
        raised.append(updated(checked, workers, 0.31, silent, fast, sent=50.0))
        checked._pending.questions[1].join(30)
        raised.append(refused(checked.look))
        silent.gate.set()
    return {"raised": raised, "said": said, "gaps": gaps}


def asleep() -> dict[str, Any]:
    """Update a server that has not answered and is asleep by now, then let it answer; return when its weights were read."""
    server, workers = Server(), Workers()
    with verifying(lambda: [server], workers, in_flight=True) as (checked, said):
        server.gate.clear()
        updated(checked, workers, 0.1, server)
        server.asleep = True
        server.gate.set()
        _until_answered(checked)
    return {"read asleep": server.read}


def managed() -> dict[str, list[str]]:
    """Return the replicas that the driver finds while verl's own manager of updates is given one more and loses one."""
    from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.workers.config import CheckpointEngineConfig
    from verl.workers.rollout.llm_server import LLMServerManager

    trainer_class: Any = type("Trainer", (MismatchTrainer, PPOTrainerSync), {})
    driver = object.__new__(trainer_class)
    servers_of_verl: Any = object.__new__(LLMServerManager)
    servers_of_verl.rollout_replicas = ["first", "second"]
    manager: Any = CheckpointEngineManager(CheckpointEngineConfig(), None, servers_of_verl.get_replicas())
    driver.llm_server_manager, driver.checkpoint_manager = servers_of_verl, manager
    found = {"start": list(driver._replicas())}
    manager.add_replicas(["third"])
    found["added"] = list(driver._replicas())
    manager.remove_replicas(["first"])
    found["removed"] = list(driver._replicas())
    return found


def elastic() -> dict[str, Any]:
    """Add a server between two updates, let it hold garbled weights after one, and remove the first."""
    first, second = Server(), Server()
    running, workers = [first], Workers()
    with verifying(lambda: running, workers) as (checked, said):
        raised = [updated(checked, workers, 0.1, first)]
        before = checked._verifiers[0]
        running.append(second)
        raised.append(updated(checked, workers, 0.2, first, second))
        kept, count = checked._verifiers[0] is before, len(checked._verifiers)
        second.held = 50.0
        raised.append(updated(checked, workers, 0.3, first))
        running.remove(first)
        after = len(checked._verifiers)
        raised.append(updated(checked, workers, 0.4, second))
    return {"raised": raised, "said": said, "kept": kept, "counts": [count, after, len(checked._verifiers)]}


def parted() -> dict[str, Any]:
    """Look at an actor of three ranks of which the last has other weights."""
    server, workers = Server(), Workers(3)
    with verifying(lambda: [server], workers) as (checked, said):
        alike = refused(checked.look)
        workers.held[2] = 0.5
        apart = refused(checked.look)
    found: dict[str, Any] = {"alike": alike, "apart": apart, "said": said}
    # The last rank differs by 0.04 nats at first, which is this model's rounding in bfloat16.
    server, workers = Server(), Workers(3)
    with verifying(lambda: [server], workers, dtypes=("bfloat16", "bfloat16")) as (checked, said):
        workers.held[2] = 0.04
        found["at first"] = refused(checked.look)
        workers.held[2] = 0.05
        found["rounding"] = refused(checked.look)
        workers.held[2] = 0.6
        found["parted"] = refused(checked.look)
        workers.held[2] = float("nan")
        found["not finite"] = refused(checked.look)
    return found


def followed() -> dict[str, Any]:
    """Follow the weights of two servers of which one does not answer, at the first update and later, and by a bug of ours."""
    report = recorded("dense")["rollouts"][0]["reports"][0]
    found: dict[str, Any] = {}

    def answers(step: int, failure: Exception | None) -> list[RolloutAnswer]:
        answered = RolloutAnswer(engine="vllm", expected=1, reports=[report | {"weight_version": step}])
        return [answered, answered if failure is None else RolloutAnswer(engine="vllm", expected=1, failure=failure)]

    late = GetTimeoutError("not within 120 s")
    bug = RayTaskError("ask", "trace", AttributeError("of ours")).as_instanceof_cause()
    engine = RayTaskError("ask", "trace", EngineError("its engine failed")).as_instanceof_cause()
    for name, failures in {
        "first": (late,), "late": (None, late, late, None), "engine": (None, engine), "bug": (None, bug),
    }.items():  # fmt: skip
        run: Any = object.__new__(processes.Processes)
        run.origins, said = Origins(SamplingSettings()), []
        run.event = lambda *event, said=said: said.append(event)
        raised, versions = [], []
        for step, failure in enumerate(failures):
            run._read = lambda step=step, failure=failure: answers(step, failure)
            raised.append(refused(run.follow_weights, step))
            versions.append(None if run.origins.present is None else run.origins.present.weight_version)
        found[name] = {"raised": raised, "versions": versions, "said": said}
    run._read = lambda: [replace(answer, failure=late, reports=()) for answer in answers(2, None)]
    said.clear()
    found["none"] = {"raised": refused(run.follow_weights, 2), "version": run.origins.present.weight_version}
    return found


def failures() -> dict[str, str]:
    """Return what becomes of errors while a server is asked, by whose they are."""
    found = {}
    for name, error, ours in (
        ("late", GetTimeoutError("120 s"), False),
        ("of verl's method", RayTaskError("f", "t", KeyError("x")).as_instanceof_cause(), False),
        ("of our method", RayTaskError("f", "t", KeyError("x")).as_instanceof_cause(), True),
        ("of the engine in our method", RayTaskError("f", "t", EngineError("x")).as_instanceof_cause(), True),
        ("of the driver", TypeError("of ours"), False),
    ):
        with mock.patch.object(servers.ray, "get", side_effect=error):
            try:
                servers._answers([], 1.0, "answer", ours=ours)
            except EngineError as raised:
                found[name] = "EngineError" if type(raised) is EngineError else type(raised).__name__
            except Exception as raised:  # noqa: BLE001 - what it is, the test says
                found[name] = type(raised).__name__
    return found


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
