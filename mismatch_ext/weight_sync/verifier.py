"""Verifies weight updates: both sides score the same probes; a bad verdict writes an event and may raise (`monitor.weight_sync`).

probes = draw_probes(vocabulary, longest=engine_context)
verifier = WeightVerifier(trainer, engine, monitor, probes, dtype="bfloat16")
verifier.begin()                      # the engine holds the weights that training starts from
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

# Choices: enough places for the rules of `weight_sync/checker.py`, and 256 tokens are scored in one batch.
PROBES, PROBE_LENGTH = 8, 32
DECODE_TOKENS = 8
"""Tokens that the engine samples in the place of the last ones of each probe, the first by prefill and the others by its decode.
Captured graphs, packed copies and caches with old weights show there alone."""
EVENT = "weight_sync"
"""Name of the event that says that an update went wrong."""


class Trained(Protocol):
    """The methods that are called on the trainer; `mismatch_ext.run.TrainerSide` has them."""

    def score(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities `[N, T-1]`, at temperature 1, of all tokens `[N, T]` but each row's first."""

    def fingerprint(self) -> str:
        """Return a digest of the present weights."""


class Sampled(Protocol):
    """The methods that are called on the engine; `mismatch_ext.run.RolloutSide` has them."""

    def score(self, tokens: Tensor) -> Tensor:
        """Return what the trainer's `score` returns, `[N, T-1]`, by the engine's prefill."""

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Sample `count` tokens after each prompt of `[N, P]`; the same weights give the same tokens.

        Sampling is at temperature 1, without truncation, and goes on after a token that ends a text. It must not advance the
        engine's own random numbers.
        """

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare what the engine holds with the tensors just sent and those sent before; leave out what it cannot reach."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The trainer's weights at one moment, as the probes see them.

    Args:
        logprobs: Log-probabilities of the probes `[N, T-1]`.
        fingerprint: Digest of the weights.
    """

    logprobs: Tensor
    fingerprint: str


def draw_probes(vocabulary: Tensor, longest: int | None = None) -> Tensor:
    """Draw the fixed probe sequences; all token ids are equally likely, so that rare embeddings are probed too.

    Args:
        vocabulary: Token ids `[V]` that probes may use, int64; the probes lie on its device.
        longest: The most tokens that the engine can score in one sequence; None for no limit.

    Returns:
        Token ids `[N, T]`, int64, the same in every run with this vocabulary.
    """
    length = PROBE_LENGTH if longest is None else min(PROBE_LENGTH, longest)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(vocabulary), (PROBES, length), generator=generator)
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
        event: Called with level, name and message when an update went wrong; None writes nothing.
        name: The engine's name in that message, when there are several engines.
        decode_tokens: The engine decodes this many tokens instead of each probe's last ones, and they are compared with its
            prefill; 0 for none.

    Attributes:
        checker: Judges the engine's prefill.
        decoding: Judges the engine's decode.
        decoded: Number of tokens that the engine decodes after each prompt; 0 when decode is not checked.
        verdict: The last verdict; None before the first.

    Raises:
        PrecisionError: A name is not a compute dtype.
        ConfigError: The engine has no `decode`, and `decode_tokens` is not 0.
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
        decode_tokens: int = DECODE_TOKENS,
    ) -> None:
        self.trainer, self.rollout, self.monitor, self.probes = trainer, rollout, monitor, probes
        self.checker = WeightSyncChecker(dtype, trainer_dtype=trainer_dtype)
        self.decoding = DecodeChecker(dtype)
        self.decoded = min(decode_tokens, probes.shape[1] - 1)
        self.verdict: SyncVerdict | None = None
        self._event, self._name = event, name
        self._fingerprint: str | None = None
        self._before: Mapping[str, Any] = {}
        if self.decoded and not callable(getattr(rollout, "decode", None)):
            raise ConfigError(
                f"mismatch.monitor.weight_sync={monitor.weight_sync!r}: {type(rollout).__name__} cannot be asked to decode; give "
                "it the method `decode` of mismatch_ext.run.RolloutSide, or set weight_sync to 'off'."
            )

    def begin(self) -> None:
        """Note the gap before the first update, while the engine holds the weights that training starts from.

        Do not call this if the engine's weights are random until the first update. The first update's gap is then the only
        baseline, and garbled weights go unnoticed up to the ceiling.

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
        """Ask only the trainer; when the sides take turns on a device, pass the result to `verify` once the engine is awake."""
        return Look(fingerprint=self.trainer.fingerprint(), logprobs=self.trainer.score(self.probes))

    def moved(self) -> bool:
        """Tell whether the trainer's weights differ from those at the last verdict."""
        return self.trainer.fingerprint() != self._fingerprint

    def judge(self, sent: Mapping[str, Any] | None = None, look: Look | None = None) -> SyncVerdict:
        """Judge whether the engine holds the trainer's present weights, whoever sent them; a bad verdict is only returned.

        Args:
            sent: Samples of the tensors that the last update sent, for the engine's `compare`; None compares none.
            look: What `look` returned for the present weights; None asks the trainer now.

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
            # If prefill is wrong too, that is the cause to name.
            if self.verdict.ok and not decode.ok:
                self.verdict = replace(self.verdict, status="stale_decode", message=decode.message)
        return self.verdict

    @property
    def prompts(self) -> Tensor:
        """Prompts `[N, P]` after which the engine decodes: the probes without their last `decoded` tokens."""
        return self.probes[:, : self.probes.shape[1] - self.decoded]

    def _ask(self) -> tuple[Tensor, tuple[Decoded, Tensor] | None]:
        """Return prefill's scores of the probes, and the decoded tokens with prefill's scores of them."""
        count = self.decoded
        if count == 0:
            return self.rollout.score(self.probes), None
        # Decode before anything is scored, so that decoding meets whatever a cache still holds for these prompts.
        decoded = self.rollout.decode(self.prompts, count)
        scores = self.rollout.score(torch.cat([self.probes, decoded.tokens.to(self.probes.device)]))
        return scores[: len(self.probes)], (decoded, scores[len(self.probes) :, -count:])

    def verify(self, sent: Mapping[str, Any] | None = None, look: Look | None = None) -> SyncVerdict:
        """Judge the last update as `judge` does; if it is bad, write an event, and raise if the block says so.

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
        """Return the state that a resumed run continues from, as JSON-able data."""
        return self.checker.state_dict() | {"decode": self.decoding.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Continue from what `state_dict` returned, if it was kept under the same settings.

        Returns:
            A sentence that says why the check begins anew, when the settings differ; None when it continues.

        Raises:
            WeightSyncError: The state is of another version of this package.
        """
        kept = state.get("versions")
        shape = [len(self.probes), self.probes.shape[1] - 1]
        if state.get("version") == STATE_VERSION and not kept:
            return None  # a run that verified nothing left this state
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
