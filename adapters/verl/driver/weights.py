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
from mismatch_ext.weights import (
    BitSums,
    Decoded,
    Shape,
    TensorComparison,
    TrainerLook,
    WeightVerifier,
    added,
    compare_sums,
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


class Actor:
    """The trainer's side: verl's actor, in its workers, whose tensors are compared in the rollout's dtype.

    `shapes` are those of the whole tensors that can be compared, and `sums` the sums of their bits when the actor was last asked.
    """

    def __init__(self, workers: Any, dtype: str) -> None:
        self._workers, self._dtype = workers, dtype
        self.shapes: dict[str, Shape] = {}
        self.sums: dict[str, BitSums] = {}

    def look(self, tokens: Tensor) -> TrainerLook:
        """Return what all ranks say of the actor's present weights, which come to the device for it: the rollout must sleep."""
        found = self._workers.mismatch_look(tokens.tolist(), self._dtype)
        self.shapes = {name: tuple(shape) for answer in found for name, shape in answer["shapes"].items()}
        self.sums = added(answer["sums"] for answer in found)
        logprobs = torch.tensor(found[0]["logprobs"], dtype=torch.float64)
        return TrainerLook(logprobs=logprobs, fingerprint="|".join(answer["fingerprint"] for answer in found))

    def score(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities `[N, T-1]`, float64."""
        return self.look(tokens).logprobs

    def fingerprint(self) -> str:
        """Return a digest of every rank's shards."""
        return self.look(torch.zeros(1, 2, dtype=torch.int64)).fingerprint


class Engine:
    """The rollout's side: one replica's engine. All engines are asked before any is waited for, so that they compute at once.

    `decoded` is what it decoded after the probes' beginnings, `probes` are the pending scores of the probes and of that, `sums`
    the sums of the bits of its tensors.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.decoded: Decoded | None = None
        self.probes: Sequence[Any] = ()
        self.sums: Mapping[str, BitSums] = {}

    def score(self, tokens: Tensor) -> Tensor:
        """Return the answer to the tokens that were last asked `[N, T-1]`, float64."""
        # Dropped here, so that no answer stays in memory until the next update.
        probes, self.probes = self.probes, ()
        return answered(probes, ANSWER_TIMEOUT)

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Return what the engine decoded when it was last asked to."""
        assert self.decoded is not None  # `RolloutWeights` asks the engine before the verifier calls this
        return self.decoded

    def compare(self, sent: Mapping[str, BitSums], before: Mapping[str, BitSums]) -> Sequence[TensorComparison]:
        """Compare embeddings and norms by the sums of their bits; SGLang's servers report none."""
        return compare_sums(self.sums, sent, before, self._actor.shapes)


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
        self._replicas, self._probes = replicas, probes
        self._actor = Actor(workers, dtype)
        self._looked: TrainerLook | None = None
        self._verifiers: list[tuple[WeightVerifier, Engine]] = []
        for server in range(len(replicas)):
            engine = Engine(self._actor)
            verifier = WeightVerifier(
                self._actor,
                engine,
                monitor,
                probes,
                dtype=dtype,
                trainer_dtype=trainer_dtype,
                event=event,
                name=f"rollout server {server}",
            )
            self._verifiers.append((verifier, engine))

    @property
    def gap(self) -> float | None:
        """Mean gap of the probes after the last update, of the worst engine; None before the first."""
        return max((v.verdict.gap_mean for v, _ in self._verifiers if v.verdict is not None), default=None)

    def look(self) -> None:
        """Ask the actor for its present weights; to be called while the rollout sleeps."""
        self._looked = self._actor.look(self._probes)

    def verify(self) -> None:
        """Check that each engine computes with the weights that the actor had when it was asked.

        Raises WeightSyncError if one does not and `monitor.weight_sync` is "error", EngineError if a server does not answer.
        """
        if self._looked is None:
            return
        look, self._looked = self._looked, None
        self._decode()
        engines = [engine for _, engine in self._verifiers]
        for replica, engine in zip(self._replicas, engines, strict=True):
            engine.probes = ask_probes(replica, self._scored_by(engine))
        sums = [ask_sums(replica, self._actor.shapes, ANSWER_TIMEOUT) for replica in self._replicas]
        for held, engine in zip(sums, engines, strict=True):
            engine.sums = added(answered_sums(held, ANSWER_TIMEOUT))
        for verifier, _ in self._verifiers:
            verifier.verify(self._actor.sums, look)

    def _decode(self) -> None:
        """Let each engine decode after the probes' beginnings, all at once, where the block asks for it."""
        verifier = self._verifiers[0][0]
        if not verifier.decoded:
            return
        prompts = verifier.prompts.tolist()
        asked = [ask_decode(replica, prompts, verifier.decoded) for replica in self._replicas]
        for (_, engine), pending in zip(self._verifiers, asked, strict=True):
            engine.decoded = answered_decode(pending, prompts, ANSWER_TIMEOUT)

    def _scored_by(self, engine: Engine) -> list[list[int]]:
        """Return the tokens that an engine is to score: the probes, and what it has decoded."""
        decoded = [] if engine.decoded is None else engine.decoded.tokens.tolist()
        return [*self._probes.tolist(), *decoded]

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run continues the check, as JSON-able data."""
        return {"engines": [verifier.state_dict() for verifier, _ in self._verifiers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Continue the check from what `state_dict` returned; return a message if something begins anew under other settings."""
        engines = state["engines"]
        if len(engines) != len(self._verifiers):
            return (
                f"the check of weight updates begins anew: it was kept of {len(engines)} engines, and there are "
                f"{len(self._verifiers)}."
            )
        said = [verifier.load_state_dict(kept) for (verifier, _), kept in zip(self._verifiers, engines, strict=True)]
        return next(filter(None, said), None)
