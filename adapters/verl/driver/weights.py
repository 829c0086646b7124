"""The check of weight updates in verl: one verifier for each rollout server, all of one actor.

verl's replicas start with random weights and sleep until the first update. Before it there is no gap to measure, so the gap
after it is the first baseline. Actor and rollout take turns on a device: the actor is asked before an update, while the rollout
sleeps, and the engines are asked after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mismatch_ext.adapters.verl.driver.servers import (
    answered,
    answered_decode,
    answered_sums,
    ask_decode,
    ask_probes,
    ask_sums,
)
from torch import Tensor

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import EngineError, WeightSyncError
from mismatch_ext.weights import (
    UNANSWERED_EVENT,
    BitSums,
    Decoded,
    Shape,
    TensorComparison,
    TrainerLook,
    WeightVerifier,
    added,
    compare_sums,
    unanswered,
)

ANSWER_TIMEOUT = 120.0
"""Seconds that a rollout server may take to answer a question."""


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

    `decoded` is what it decoded after the probes' beginnings, `probes` are the pending scores of the probes and of that, `sums`
    those of the bits of its tensors, and `shapes` are of the actor's whole tensors.
    """

    def __init__(self, replica: Any) -> None:
        self.replica = replica
        self.decoded: Decoded | None = None
        self.probes: Sequence[Any] = ()
        self.sums: Mapping[str, BitSums] = {}
        self.shapes: Mapping[str, Shape] = {}

    def score(self, tokens: Tensor) -> Tensor:
        """Return the answer to the tokens that were last asked `[N, T-1]`, float64."""
        # Dropped here, so that no answer stays in memory until the next update.
        probes, self.probes = self.probes, ()
        return answered(probes, ANSWER_TIMEOUT)

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Return what the engine decoded when it was last asked to."""
        assert self.decoded is not None
        return self.decoded

    def compare(self, sent: Mapping[str, BitSums], before: Mapping[str, BitSums]) -> Sequence[TensorComparison]:
        """Compare embeddings and norms by the sums of their bits; SGLang's servers report none."""
        return compare_sums(self.sums, sent, before, self.shapes)


class RolloutWeights:
    """Verifies each weight update of a run by probe tokens `[N, T]`; `event` gets level, name and message of what is wrong."""

    def __init__(
        self,
        workers: Any,
        replicas: Sequence[Any],
        monitor: MonitorConfig,
        probes: Tensor,
        *,
        dtype: str,
        trainer_dtype: str,
        event: Callable[[str, str, str], None],
    ) -> None:
        self._workers, self._probes, self._dtype, self._event = workers, probes, dtype, event
        self._looked: TrainerLook | None = None
        self._sums: dict[str, BitSums] = {}
        self._shapes: dict[str, Shape] = {}
        self._engines = [Engine(replica) for replica in replicas]
        actor: Any = None  # it is looked at once for all engines, here
        self._verifiers = [
            WeightVerifier(
                actor,
                engine,
                monitor,
                probes,
                dtype=dtype,
                trainer_dtype=trainer_dtype,
                event=event,
                name=f"rollout server {server}",
            )
            for server, engine in enumerate(self._engines)
        ]

    @property
    def gap(self) -> float | None:
        """Mean gap of the probes after the last update, of the worst engine; None before the first."""
        return max((one.verdict.gap_mean for one in self._verifiers if one.verdict is not None), default=None)

    def look(self) -> None:
        """Ask all ranks for the actor's present weights, which come to the device for it: the rollout must sleep."""
        found = self._workers.mismatch_look(self._probes.tolist(), self._dtype)
        self._shapes = {name: tuple(shape) for answer in found for name, shape in answer["shapes"].items()}
        self._sums = added(answer["sums"] for answer in found)
        logprobs = torch.tensor(found[0]["logprobs"], dtype=torch.float64)
        self._looked = TrainerLook(logprobs=logprobs, fingerprint="|".join(answer["fingerprint"] for answer in found))

    def verify(self, *, stepped: bool) -> None:
        """Check that each engine computes with the weights that the actor had when it was asked.

        `stepped` says whether the actor's optimizer has stepped since the last update.
        If a server does not answer, nothing is known of this update, which is a warning. Raises WeightSyncError as
        `WeightVerifier.verify` does.
        """
        if self._looked is None:
            return
        look, self._looked = self._looked, None
        try:
            self._ask()
        except EngineError as error:
            for verifier in self._verifiers:
                verifier.leave_unknown(self._sums, look)
            self._event("warning", UNANSWERED_EVENT, unanswered(error))
            return
        wrong: list[WeightSyncError] = []
        for verifier in self._verifiers:
            try:
                verifier.verify(self._sums, look, stepped=stepped)
            except WeightSyncError as error:
                wrong.append(error)  # the other servers are judged all the same
        if wrong:
            raise wrong[0]

    def _ask(self) -> None:
        """Ask all engines before any is waited for, so that they compute at once."""
        prompts, count = self._verifiers[0].prompts.tolist(), self._verifiers[0].decoded
        decoding = [ask_decode(engine.replica, prompts, count) for engine in self._engines]
        for engine, pending in zip(self._engines, decoding, strict=True):
            engine.decoded = answered_decode(pending, prompts, ANSWER_TIMEOUT)
            engine.probes = ask_probes(engine.replica, [*self._probes.tolist(), *engine.decoded.tokens.tolist()])
        sums = [ask_sums(engine.replica, self._shapes, ANSWER_TIMEOUT) for engine in self._engines]
        for engine, pending in zip(self._engines, sums, strict=True):
            engine.sums, engine.shapes = added(answered_sums(pending, ANSWER_TIMEOUT)), self._shapes

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
