"""The check of weight updates in verl: one verifier for each rollout server, all of one actor.

verl's replicas start with random weights and sleep until the first update. Before it there is no gap to measure, so the gap
after it is the first baseline. Actor and rollout take turns on a device: the actor is asked before an update, while the rollout
sleeps, and the engines are asked after it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mismatch_ext.adapters.verl.driver.servers import (
    answered,
    answered_decode,
    answered_sums,
    ask_decode,
    ask_probes,
    ask_sums,
    has_priorities,
)
from torch import Tensor

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import EngineError, WeightSyncError
from mismatch_ext.events import SYNC_UNANSWERED, WEIGHT_SYNC
from mismatch_ext.weights import (
    BitSums,
    Decoded,
    Shape,
    TensorComparison,
    TrainerLook,
    WeightVerifier,
    added,
    compare_sums,
    limit_of_rounding,
    unanswered,
)

ANSWER_TIMEOUT = 120.0
"""Seconds that a rollout server may take to answer a question."""
LAST_TIMEOUT = 30.0
"""Seconds that the end of a training waits for what servers say of the last update."""


def unverified(rollout: Any, monitor: MonitorConfig) -> str | None:
    """Return why weight updates cannot be verified although the block asks for it; None if they are, or it does not ask."""
    size = int(rollout.get("data_parallel_size") or 1)
    if size == 1 or monitor.weight_sync == "off":
        return None
    return (
        f"actor_rollout_ref.rollout.data_parallel_size={size}: the rollout's weights are not verified, because a server answers "
        "for its first engine alone. Everything else of the block is active."
    )


class Engine:
    """The rollout's side: one replica's engine, which has been asked when the verifier calls these methods.

    Attributes:
        answers: What it answered; None if it has not.
        shapes: Shapes of the actor's whole tensors.
    """

    def __init__(self) -> None:
        self.answers: Answers | None = None
        self.shapes: Mapping[str, Shape] = {}

    def score(self, tokens: Tensor) -> Tensor:
        """Return the answer to the tokens that were last asked `[N, T-1]`, float64."""
        assert self.answers is not None
        return self.answers.scores

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Return what the engine decoded when it was last asked to."""
        assert self.answers is not None
        return self.answers.decoded

    def compare(self, sent: Mapping[str, BitSums], before: Mapping[str, BitSums]) -> Sequence[TensorComparison]:
        """Compare embeddings and norms by the sums of their bits; SGLang's servers report none."""
        assert self.answers is not None
        return compare_sums(self.answers.sums, sent, before, self.shapes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """What an engine answered after an update: tokens that it decoded, scores of these and the probes, sums of its tensors."""

    decoded: Decoded
    scores: Tensor
    sums: Mapping[str, BitSums]


class Question:
    """What one replica is asked after an update; a thread waits for its answers, so that no other replica waits with it.

    Answers that come after the next update stay in their question, and are never taken for those of that update.

    Attributes:
        answers: What the replica answered, or why it gave no answer; None so far.
        bug: An error that is not the server's.
    """

    def __init__(self, replica: Any, probes: Tensor, prompts: Tensor, count: int, shapes: Mapping[str, Shape]) -> None:
        self.answers: Answers | EngineError | None = None
        self.bug: BaseException | None = None
        self._replica, self._probes = replica, probes
        self._prompts = prompts.tolist()
        self._decoding = ask_decode(replica, self._prompts, count)
        # Asked at once, while the server is awake: later verl may have put its weights to sleep.
        self._summing = ask_sums(replica, shapes, ANSWER_TIMEOUT)
        self._thread = threading.Thread(target=self._wait, name="mismatch-probes", daemon=True)

    def start(self) -> None:
        """Wait for the answers in a thread, which ends with the process."""
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the replica has answered, or is known to be silent, for so long at most."""
        self._thread.join(seconds)

    def _wait(self) -> None:
        try:
            self.answers = self._answers()
        except EngineError as error:
            self.answers = error
        except BaseException as error:  # noqa: BLE001 - the thread's end must not be silent: the driver says so
            self.bug = error
            self.answers = EngineError(
                f"the rollout server's answer could not be read: {type(error).__name__}: {error}"
            )

    def _answers(self) -> Answers:
        decoded = answered_decode(self._decoding, self._prompts, ANSWER_TIMEOUT)
        tokens = [*self._probes.tolist(), *decoded.tokens.tolist()]
        scores = answered(ask_probes(self._replica, tokens), ANSWER_TIMEOUT)
        sums = answered_sums(self._summing, ANSWER_TIMEOUT)
        return Answers(decoded=decoded, scores=scores, sums=added(sums))


class RolloutWeights:
    """Verifies each weight update of a run by probe tokens `[N, T]`; `event` gets level, name and message of what is wrong.

    `find_replicas` returns the replicas of the moment. With `in_flight`, other requests are running when an update ends. Engines
    without priorities then answer in the background, and what they said is judged before the next update.
    """

    def __init__(
        self,
        workers: Any,
        find_replicas: Callable[[], Sequence[Any]],
        monitor: MonitorConfig,
        probes: Tensor,
        *,
        dtype: str,
        trainer_dtype: str,
        event: Callable[[str, str, str], None],
        in_flight: bool = False,
    ) -> None:
        self._workers, self._find_replicas, self._monitor, self._probes = workers, find_replicas, monitor, probes
        self._dtype, self._trainer_dtype, self._event = dtype, trainer_dtype, event
        self._in_flight = in_flight
        self._looked: TrainerLook | None = None
        self._ranks_apart: float | None = None  # by how much, in nats, the actor's ranks differed at the first look
        self._sums: dict[str, BitSums] = {}
        self._shapes: dict[str, Shape] = {}
        self._pending: _Pending | None = None
        self._replicas: list[Any] = []
        self._verifiers: list[WeightVerifier] = []
        self._take_replicas()

    def _take_replicas(self) -> None:
        """Take the replicas of the moment: one that stays keeps its verifier, and a new one begins anew."""
        known = dict(zip(map(id, self._replicas), self._verifiers, strict=True))
        self._replicas = list(self._find_replicas())
        self._verifiers = [
            known.get(id(replica)) or self._new_verifier(server) for server, replica in enumerate(self._replicas)
        ]

    def _new_verifier(self, server: int) -> WeightVerifier:
        actor: Any = None  # it is looked at once for all engines, here
        return WeightVerifier(
            actor,
            Engine(),
            self._monitor,
            self._probes,
            dtype=self._dtype,
            trainer_dtype=self._trainer_dtype,
            event=self._event,
            name=f"rollout server {server}",
        )

    @property
    def gap(self) -> float | None:
        """Mean gap of the probes after the last update, of the worst engine; None before the first."""
        return max((one.verdict.gap_mean for one in self._verifiers if one.verdict is not None), default=None)

    @property
    def unanswered(self) -> int:
        """How many updates in a row the server that has been silent for longest has not answered."""
        return max((one.unanswered for one in self._verifiers), default=0)

    def look(self) -> None:
        """Ask all ranks for the actor's present weights, which come to the device for it: the rollout must sleep.

        Raises WeightSyncError if ranks differ.
        """
        found = self._workers.mismatch_look(self._probes.tolist(), self._dtype)
        self._shapes = {name: tuple(shape) for answer in found for name, shape in answer["shapes"].items()}
        self._sums = added(answer["sums"] for answer in found)
        of_ranks = torch.tensor([answer["logprobs"] for answer in found], dtype=torch.float64)
        self._looked = TrainerLook(
            logprobs=of_ranks[0], fingerprint="|".join(answer["fingerprint"] for answer in found)
        )
        self._compare_ranks(of_ranks)

    def _compare_ranks(self, logprobs: Tensor) -> None:
        """Raise if a rank of the actor scores the probes `[ranks, N, T-1]` with other weights than the first one."""
        first = logprobs[0]
        apart = (logprobs - first).abs().masked_fill(logprobs.isnan() & first.isnan(), 0.0)
        of_ranks = apart.nan_to_num(nan=math.inf).flatten(1).mean(1)
        rank = int(of_ranks.argmax())
        largest = float(of_ranks[rank])
        # Ranks compute with the same kernels. What they differ by at first, when all have loaded the same weights, is rounding.
        usual = math.inf if self._ranks_apart is None else self._ranks_apart
        limit = limit_of_rounding(usual, self._trainer_dtype)
        if largest <= limit:
            if self._ranks_apart is None:
                self._ranks_apart = largest
            return
        message = (
            f"the actor's rank {rank} scores probe tokens {largest:.3g} nats from rank 0 on average; up to "
            f"{limit:g} is rounding. The replicas of the actor have parted: resume from a checkpoint before that."
        )
        self._event("error", WEIGHT_SYNC, message)
        if self._monitor.weight_sync != "warn":
            raise WeightSyncError(message)

    def verify(self, *, stepped: bool) -> None:
        """Check that each engine computes with the weights that the actor had when it was asked.

        `stepped` says whether the actor's optimizer has stepped since the last update.
        If a server does not answer, nothing is known of this update, which is a warning. Raises WeightSyncError as
        `WeightVerifier.verify` does; if the engines answer in the background, the next call of `settle` does.
        """
        if self._looked is None:
            return
        look, self._looked = self._looked, None
        self._take_replicas()
        if not self._verifiers:
            return
        first = self._verifiers[0]
        # All are asked before any is waited for, so that they compute at once.
        questions = [
            Question(replica, self._probes, first.prompts, first.decoded, self._shapes) for replica in self._replicas
        ]
        for question in questions:
            question.start()
        self._pending = _Pending(questions=questions, look=look, sums=self._sums, shapes=self._shapes, stepped=stepped)
        if self._in_flight and not all(has_priorities(replica) for replica in self._replicas):
            return
        self._pending.wait()
        self.settle()

    def settle(self, *, wait: float = 0.0) -> None:
        """Judge what the engines said of the last update; those without an answer after `wait` seconds are unknown."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.join(wait)
        wrong: list[WeightSyncError] = []
        for verifier, answer in zip(self._verifiers, pending.answers(), strict=True):
            if isinstance(answer, EngineError):
                verifier.leave_unknown(pending.sums, pending.look)
                self._event("warning", SYNC_UNANSWERED, unanswered(answer))
                continue
            engine = verifier.rollout
            assert isinstance(engine, Engine)
            engine.answers, engine.shapes = answer, pending.shapes
            try:
                verifier.verify(pending.sums, pending.look, stepped=pending.stepped)
            except WeightSyncError as error:
                wrong.append(error)  # the other servers are judged all the same
            finally:
                engine.answers = None  # so that no answer stays in memory until the next update
        if wrong:
            raise wrong[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run continues the check, as JSON-able data."""
        return {"engines": [verifier.state_dict() for verifier in self._verifiers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Continue the check from what `state_dict` returned; return a message if something begins anew under other settings."""
        engines = state["engines"]
        if len(engines) != len(self._verifiers):
            return (
                f"the check of weight updates begins anew: it was kept of {len(engines)} engines, and there are "
                f"{len(self._verifiers)}."
            )
        said = [verifier.load_state_dict(kept) for verifier, kept in zip(self._verifiers, engines, strict=True)]
        return next(filter(None, said), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    """What the replicas were asked after an update, with what the actor had then."""

    questions: Sequence[Question]
    look: TrainerLook
    sums: Mapping[str, BitSums]
    shapes: Mapping[str, Shape]
    stepped: bool

    def wait(self) -> None:
        """Wait until each replica has answered or is known to be silent; raises a bug of ours as it is."""
        for question in self.questions:
            question.join()
        for question in self.questions:
            if question.bug is not None:
                raise question.bug

    def join(self, seconds: float) -> None:
        """Wait for all replicas, together for so long at most."""
        end = time.monotonic() + seconds
        for question in self.questions:
            question.join(max(0.0, end - time.monotonic()))

    def answers(self) -> list[Answers | EngineError]:
        """Return each replica's answers, or that it gave none so far."""
        late = EngineError("the rollout server has not answered in time")
        return [late if question.answers is None else question.answers for question in self.questions]
