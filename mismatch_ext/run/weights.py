"""Sends a loop's weights to the engine, and verifies that `run.step` made them and that the engine has them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import LoopError
from mismatch_ext.recorder import PREFIX
from mismatch_ext.run.log import RunLog
from mismatch_ext.run.loop import Loop
from mismatch_ext.run.start import audited
from mismatch_ext.weight_sync import SyncVerdict
from mismatch_ext.weight_sync.verifier import WeightVerifier, draw_probes


class Weights:
    """Sends the trainer's weights, and verifies that the engine has the weights of the run's last step.

    Args:
        loop: The loop.

    Attributes:
        stepped: Whether the run has taken a step since weights were last sent.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop, self._trainer, self._rollout, self._verdicts = loop, loop.trainer, loop.rollout, loop.verdicts
        self._verifier: WeightVerifier | None = None
        self._sent_once = self.stepped = False

    def begin(self, dtype: str, log: RunLog, *, resumed: bool) -> None:
        """Prepare to verify updates, as `monitor.weight_sync` says.

        Args:
            dtype: Dtype of the results of the trainer's matrix products.
            log: Where bad updates are written.
            resumed: Whether the run is resumed, so that the engine does not hold the trainer's weights yet.
        """
        monitor, rollout = self._loop.block.monitor, self._rollout
        if monitor.weight_sync == "off":
            return

        def wrong(level: str, name: str, message: str) -> None:
            log.event(level, name, message)
            if monitor.weight_sync == "warn":
                warnings.warn(message, stacklevel=6)

        with self._loop.together(), self._verdicts.checking("weight_sync"):
            probes = draw_probes(self._trainer.vocabulary(), rollout.longest)
            engine = rollout.reading().model_dtype
            verifier = WeightVerifier(
                self._trainer, rollout, monitor, probes, dtype=engine, trainer_dtype=dtype, event=wrong
            )
            if not resumed:
                verifier.begin()
            self._verifier = verifier

    def check_sent(self) -> None:
        """Refuse rollouts of an engine that lacks the trainer's present weights.

        Raises:
            LoopError: The trainer's weights have changed since they were sent.
        """
        with self._verdicts.checking("records"):
            if self._verifier is not None and self._verifier.moved():
                raise LoopError(
                    f"step {self._loop.steps}: the trainer's weights have changed since the engine got them: call run.send() "
                    "before the next rollouts, or set mismatch.monitor.weight_sync='off'."
                )

    def send(self) -> SyncVerdict | None:
        """Send the weights, and verify that the engine computes with them; as `Run.send`."""
        self._check_stepped()
        with self._loop.together():
            reading, samples = self._rollout.update(self._trainer.checkpoint_parameters())
            if not self._sent_once:
                self._sent_once = True
                with self._verdicts.checking("precision"):
                    audited(self._loop, reading)
        return self._verified(samples)

    def sent(self, samples: Mapping[str, Any] | None) -> SyncVerdict | None:
        """Verify an update that the loop made itself; as `Run.sent`."""
        self._check_stepped()
        return self._verified(samples)

    def _check_stepped(self) -> None:
        block = self._loop.block
        acts = block != MismatchConfig(level=block.level, monitor=block.monitor)
        with self._loop.together():
            if not self.stepped and acts and self._verifier is not None and self._verifier.moved():
                raise LoopError(
                    f"step {self._loop.steps}: the trainer's weights have changed, and not by run.step(), which applies what the "
                    "block asks for; step by it."
                )

    def _verified(self, samples: Mapping[str, Any] | None) -> SyncVerdict | None:
        self.stepped = False
        if self._verifier is None:
            return None
        verdict: SyncVerdict | None = None
        with self._loop.together(), self._verdicts.checking("weight_sync"):
            verdict = self._verifier.verify(samples)
        if verdict is not None:
            self._loop.pending.note(PREFIX + "weight_sync_gap", verdict.gap_mean)
        return verdict

    # What a checkpoint holds.

    def state_dict(self) -> dict[str, Any]:
        """Return weight version and verifier state as JSON-able data, under the keys that a checkpoint uses."""
        state: dict[str, Any] = {"weight_version": self._rollout.weight_version}
        return state if self._verifier is None else state | {"weight_sync": self._verifier.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Continue from what `state_dict` returned, ignoring other keys; return why the check begins anew, None if it does not.

        Raises:
            WeightSyncError: The state was saved by another version of this package.
        """
        self.stepped = True  # by the run that saved it
        self._rollout.weight_version = max(self._rollout.weight_version, int(state.get("weight_version") or 0))
        if self._verifier is None or state.get("weight_sync") is None:
            return None
        return self._verifier.load_state_dict(state["weight_sync"])
