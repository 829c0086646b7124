"""Verifies weight updates: asks both sides for the same probes, judges, writes an event, raises as `monitor.weight_sync` says.

probes = draw_probes(vocabulary, monitor, longest=engine_context)
verifier = WeightVerifier(trainer, engine, monitor, probes, dtype="bfloat16")
verifier.begin()                      # the engine holds what training starts from
...                                   # an optimizer step; the weights are sent
verdict = verifier.verify()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.weight_sync.checker import (
    STATE_VERSION,
    SyncObservation,
    SyncVerdict,
    TensorComparison,
    WeightSyncChecker,
)
from mismatch_ext.weight_sync.decoding import DecodeChecker, Decoded

EVENT = "weight_sync"
"""Name of the event that says that an update went wrong."""


class Trained(Protocol):
    """What is asked of the trainer; `mismatch_ext.run.TrainerSide` has it."""

    def score(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities `[N, T-1]` at temperature 1 of tokens `[N, T]` after the first."""

    def fingerprint(self) -> str:
        """Return a digest of the present weights."""


class Sampled(Protocol):
    """What is asked of the engine; `mismatch_ext.run.RolloutSide` has it."""

    def score(self, tokens: Tensor) -> Tensor:
        """Return prefill's log-probabilities `[N, T-1]` as the trainer's `score` does."""

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Sample `count` tokens after each prompt of `[N, P]`, the same ones as long as the weights are the same.

        At temperature 1, without truncation, beyond tokens that end a text; its own random numbers are left as they are.
        """

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare tensors just sent, and those before, with what the engine holds; none out of reach."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The trainer's weights at one moment, as the probes see them.

    Args:
        logprobs: `[N, T-1]`, of the probes.
        fingerprint: Digest of the weights.
    """

    logprobs: Tensor
    fingerprint: str


def draw_probes(vocabulary: Tensor, monitor: MonitorConfig, longest: int | None = None) -> Tensor:
    """Draw the fixed probe sequences; every token id is as likely, so that rare embeddings are probed too.

    Args:
        vocabulary: Token ids `[V]` that probes may use, int64; the probes lie on its device.
        monitor: The `monitor` section, for number and length.
        longest: Tokens that the engine can score in one sequence; None if that is no limit.

    Returns:
        Token ids `[N, T]`, int64, the same in every run of this vocabulary and section.
    """
    length = monitor.weight_sync_probe_length
    length = length if longest is None else min(length, longest)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(vocabulary), (monitor.weight_sync_probes, length), generator=generator)
    return vocabulary[rows.to(vocabulary.device)]


class WeightVerifier:
    """Judges every weight update of one engine.

    Args:
        trainer: The trainer.
        rollout: The engine.
        monitor: The `monitor` section; `weight_sync` says what a bad verdict leads to.
        probes: Probe tokens `[N, T]`, int64.
        dtype: The engine's compute dtype.
        trainer_dtype: The trainer's compute dtype; None if it is the engine's or finer.
        event: Writes what is wrong with an update: level, name, message. None writes nothing.
        name: The engine's name in that message, where there are several.

    Attributes:
        checker: What judges the engine's prefill.
        decoding: What judges its decode.
        verdict: The last verdict; None before the first.

    Raises:
        PrecisionError: A name is no compute dtype.
        ConfigError: The engine's decode is to be held to its prefill, and the engine has no `decode`.
    """

    def __init__(
        self,
        trainer: Trained,
        rollout: Sampled,
        monitor: MonitorConfig,
        probes: Tensor,
        *,
        dtype: str | torch.dtype,
        trainer_dtype: str | torch.dtype | None = None,
        event: Callable[[str, str, str], None] | None = None,
        name: str = "",
    ) -> None:
        self.trainer, self.rollout, self.monitor, self.probes = trainer, rollout, monitor, probes
        self.checker = WeightSyncChecker(dtype, trainer_dtype=trainer_dtype)
        self.decoding = DecodeChecker(dtype)
        self.verdict: SyncVerdict | None = None
        self._event, self._name = event, name
        self._fingerprint: str | None = None
        self._before: Mapping[str, Any] = {}
        if self.decoded and not callable(getattr(rollout, "decode", None)):
            raise ConfigError(
                f"mismatch.monitor.weight_sync_decode_tokens={monitor.weight_sync_decode_tokens}: {type(rollout).__name__} "
                "cannot be asked to decode; give it the method `decode` of mismatch_ext.run.RolloutSide, or set it to 0."
            )

    def begin(self) -> None:
        """Note the gap before the first update, while the engine holds what training starts from.

        Where it does not (its weights are random until the first update), leave this out: the first update's gap is then the
        only baseline, and one that garbles goes unnoticed up to the ceiling.

        Raises:
            RecordError: The sides' answers differ in shape.
            NonFiniteLogprobError: A trainer's log-probability is not finite.
        """
        rollout, decoded = self._ask()
        self.checker.baseline(rollout, self.trainer.score(self.probes))
        if decoded is not None:
            self.decoding.baseline(*decoded)
        self._fingerprint = self.trainer.fingerprint()

    def look(self) -> Look:
        """Ask the trainer alone, where the two sides take turns on a device; `verify` takes it when the engine is awake."""
        return Look(fingerprint=self.trainer.fingerprint(), logprobs=self.trainer.score(self.probes))

    def moved(self) -> bool:
        """Tell whether the trainer's weights differ from those at the last verdict."""
        return self.trainer.fingerprint() != self._fingerprint

    def judge(self, sent: Mapping[str, Any] | None = None, look: Look | None = None) -> SyncVerdict:
        """Judge whether the engine holds the trainer's present weights, however they came there; writes and raises nothing.

        Args:
            sent: Samples of the tensors that the last update sent, for the engine's `compare`; None compares none.
            look: What the trainer has said of its present weights; None asks it.

        Raises:
            RecordError: The sides' answers differ in shape.
            NonFiniteLogprobError: A trainer's log-probability is not finite.
        """
        sent = {} if sent is None else sent
        rollout, decoded = self._ask()
        comparisons = self.rollout.compare(sent, self._before)
        self._before = sent
        look = self.look() if look is None else look
        self.verdict = self.checker.observe(
            SyncObservation(
                engine_logprobs=rollout,
                trainer_logprobs=look.logprobs,
                trainer_changed=look.fingerprint != self._fingerprint,
                comparisons=tuple(comparisons),
            )
        )
        self._fingerprint = look.fingerprint
        if decoded is not None:
            decode = self.decoding.observe(*decoded, numerics=self.verdict.baseline)
            self.verdict = replace(self.verdict, decode_gap=decode.gap)
            # Where prefill is wrong already, that is the cause to name.
            if self.verdict.ok and not decode.ok:
                self.verdict = replace(self.verdict, status="stale_decode", message=decode.message)
        return self.verdict

    @property
    def prompts(self) -> Tensor:
        """Prompts `[N, P]` after which the engine decodes: the probes but for as many tokens as it is to decode."""
        return self.probes[:, : self.probes.shape[1] - self.decoded]

    @property
    def decoded(self) -> int:
        """How many tokens the engine decodes after each prompt; 0 where its decode is not held to its prefill."""
        return min(self.monitor.weight_sync_decode_tokens, self.probes.shape[1] - 1)

    def _ask(self) -> tuple[Tensor, tuple[Decoded, Tensor] | None]:
        """Return prefill's scores of the probes, and what the engine decodes with prefill's scores of it."""
        count = self.decoded
        if count == 0:
            return self.rollout.score(self.probes), None
        # Before anything is scored, so that it meets whatever a cache still has of these prompts.
        decoded = self.rollout.decode(self.prompts, count)
        scores = self.rollout.score(torch.cat([self.probes, decoded.tokens.to(self.probes.device)]))
        return scores[: len(self.probes)], (decoded, scores[len(self.probes) :, -count:])

    def verify(self, sent: Mapping[str, Any] | None = None, look: Look | None = None) -> SyncVerdict:
        """Judge the last update as `judge` does; write an event of a bad one, and raise if the block says so.

        Raises:
            WeightSyncError: The engine holds stale or garbled weights and `monitor.weight_sync` is "error".
            RecordError: The sides' answers differ in shape.
            NonFiniteLogprobError: A trainer's log-probability is not finite.
        """
        verdict = self.judge(sent, look)
        if not verdict.ok:
            if self._event is not None:
                self._event("error", EVENT, f"{self._name}: {verdict.message}" if self._name else verdict.message)
            if self.monitor.weight_sync == "error":
                self.checker.raise_for(verdict)
        return verdict

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run judges on with, as JSON-able data."""
        return self.checker.state_dict() | {"decode": self.decoding.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Judge on from what `state_dict` returned.

        Returns:
            Why the check begins anew instead, where other settings would make nonsense of what was kept; None if it does not.

        Raises:
            WeightSyncError: The state is of another version of this package.
        """
        kept = state.get("versions")
        shape = [len(self.probes), self.probes.shape[1] - 1]
        if state.get("version") == STATE_VERSION and not kept:
            return None  # of a run that verified nothing
        if state.get("version") == STATE_VERSION and state.get("dtype") != self.checker.dtype:
            changed = f"it was kept for {state.get('dtype')}, and the sides compute in {self.checker.dtype}"
        elif kept and [len(kept[0]), len(kept[0][0])] != shape:
            was = f"{len(kept[0])} probes of {len(kept[0][0]) + 1} tokens"
            changed = f"it was kept of {was}, and there are {shape[0]} of {shape[1] + 1}"
        else:
            self.checker.load_state_dict(dict(state))
            if state.get("decode") is not None:  # checkpoints of older releases have none
                self.decoding.load_state_dict(state["decode"])
            return None
        return f"the check of weight updates begins anew: {changed}."
