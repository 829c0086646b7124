"""Compares an engine's decode with its own prefill: do both use the same weights, and a cache made with those weights?

After an update the engine samples a few tokens, one after the other, at temperature 1 and without truncation, and reports their
log-probabilities; then its prefill scores the same tokens. The trainer is compared with prefill, which computes each sequence
anew. If captured graphs, packed copies of weights or a prefix cache are stale, prefill is still right, and only decode is wrong.
N sequences, L tokens each; each sequence's first token is left out, because the pass over the prompt computed it.
Evidence, strongest first:

1. A reported log-probability that is not finite.
2. The decoded tokens and their log-probabilities have not changed in a bit since an update, while prefill's scores of the same
   tokens moved by more than the movement floor. Movement adds up until the decode changes.
3. On tokens that agree, with all tokens before them, with those of an older update, the decode is nearer than half the gap to
   prefill's scores of that time, and these lie beyond the movement floor.
4. The gap exceeds `max(factor * noise, floor)`, or the ceiling. The noise is this engine's own gap before the first update, or
   after it if that is smaller, and at most the gap between prefill and trainer on the probes: two passes of one engine differ by
   no more than two engines do, and a decode that was wrong from the start must not be its own measure.

Gaps and movements are means without the largest tenth of the tokens: a token that took another expert in one of the two passes
is no sign of a stale copy, because a stale copy moves most tokens. Floors and ceilings are those of `checker.py`. Seeds and
prompts are the same each time, so that rules 2 and 3 see the same tokens; if an engine's sampling is not reproducible, these two
rules find nothing.

Known limits: a copy that is stale in part, such as one expert's, moves few tokens, and passes until it moves enough of them. Code
that runs only for other shapes, such as graphs captured for larger batches, is not tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.errors import RecordError, WeightSyncError
from mismatch_ext.precision.dtypes import canonical
from mismatch_ext.weight_sync.checker import CEILING, FACTOR, FLOOR, HISTORY, MOVEMENT_FLOOR

STATE_VERSION = 1
LEFT_OUT = 0.1
"""A mean leaves out this share of the tokens: those that differ most."""
COMPARABLE = 0.25
"""Two updates are compared if at least this share of their tokens is the same."""
CURE = (
    "The engine's decode path does not compute with the weights that its prefill has. Captured graphs and packed copies of "
    "weights have to be made anew after each update, and the prefix cache to be reset: let it run without captured graphs "
    "(enforce_eager), and see that whatever updates its weights resets the cache."
)


NAN_CURE = (
    "Its prefill's are: an engine that has computed with NaN may still read it from its KV cache. Start the run again, or the "
    "engine."
)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Tokens that an engine sampled after given prompts, one after the other.

    Args:
        tokens: The prompts, each followed by its sampled tokens `[N, P+L]`, int64.
        logprobs: Log-probabilities of the sampled tokens `[N, L]` as the engine reported them, in nats, at temperature 1 over the
            whole vocabulary.
    """

    tokens: Tensor
    logprobs: Tensor


@dataclass(frozen=True, kw_only=True)
class DecodeVerdict:
    """Judgement of an engine's decode after a weight update.

    Args:
        ok: Whether decode computes as prefill does.
        gap: Mean |decode - prefill| without the largest tenth, nats per token; infinity if a decoded value is not finite.
        threshold: A gap above this is not noise.
        message: One sentence with the figures, and what to do when it is not ok.
    """

    ok: bool
    gap: float
    threshold: float
    message: str


@dataclass(frozen=True)
class _Seen:
    """The tokens sampled after one update `[N, L-1]`, and their log-probabilities by decode and by prefill."""

    tokens: Tensor
    decode: Tensor
    prefill: Tensor

    def tolist(self) -> list[list[list[float]]]:
        return [self.tokens.tolist(), self.decode.tolist(), self.prefill.tolist()]


class DecodeChecker:
    """Judges the decode of one engine after every weight update.

    Args:
        dtype: The engine's compute dtype.
        factor: A gap of up to this many times the engine's own noise still counts as noise.

    Raises:
        PrecisionError: The name is not a compute dtype.
    """

    def __init__(self, dtype: str | torch.dtype, *, factor: float = FACTOR) -> None:
        self.dtype = canonical(dtype)
        self.factor = factor
        self._noise: tuple[float, float] | None = None  # gap, and the spread of prefill's scores then
        self._observations = 0
        self._seen: list[_Seen] = []  # after the first and the latest few updates

    def baseline(self, decoded: Decoded, prefill: Tensor) -> None:
        """Note the gap before the first update.

        Args:
            decoded: What the engine sampled.
            prefill: Prefill's log-probabilities of the sampled tokens `[N, L]`.

        Raises:
            RecordError: The shapes do not fit each other.
        """
        now = _seen(decoded, prefill)
        self._offer(now)
        self._seen = []
        self._remember(now)

    def observe(self, decoded: Decoded, prefill: Tensor, numerics: float) -> DecodeVerdict:
        """Judge the decode after one update.

        Args:
            decoded: What the engine sampled.
            prefill: Prefill's log-probabilities of the sampled tokens `[N, L]`.
            numerics: Gap between prefill and trainer when both hold the same weights, nats per token.

        Raises:
            RecordError: The shapes do not fit each other.
        """
        now = _seen(decoded, prefill)
        if self._seen and self._seen[0].tokens.shape != now.tokens.shape:
            # A checkpoint under other settings; its tokens cannot be compared, and its noise is of another number of them.
            self._noise, self._observations, self._seen = None, 0, []
        if self._observations == 0:
            self._offer(now)
        self._observations += 1
        noise = min(self._scaled_noise(now), numerics)
        threshold = min(max(self.factor * noise, FLOOR[self.dtype]), CEILING[self.dtype])
        gap = _mean(now.decode - now.prefill)
        why = self._judge(now, gap, noise, threshold)
        self._remember(now)
        figures = (
            f"Mean gap between decode and prefill {gap:.3g}, {self.dtype} noise {noise:.3g}, threshold {threshold:.3g}"
        )
        figures += f" ({now.decode.numel()} tokens)."
        cure = NAN_CURE if math.isinf(gap) else CURE
        message = f"{why} {figures} {cure}" if why else f"The engine decodes as its prefill scores. {figures}"
        return DecodeVerdict(ok=not why, gap=gap, threshold=threshold, message=message)

    def _judge(self, now: _Seen, gap: float, noise: float, threshold: float) -> str:
        """Apply the rules at the top of the file in their order; return what is wrong, or "" if nothing is."""
        if math.isinf(gap):
            return "Log-probabilities of decoded tokens are not finite."
        # Two passes of prefill, each with its own noise, differ by less than this.
        floor = max(MOVEMENT_FLOOR[self.dtype], 2 * noise)
        if self._seen and _same(self._seen[-1], now):
            moved = _mean(now.prefill - self._seen[-1].prefill)
            if moved > floor:
                return f"What the engine decodes has not changed in a bit, while its prefill's scores of it moved by {moved:.3g}."
        for older in self._seen:
            # A token's log-probability depends on the tokens before it.
            common = (now.tokens == older.tokens).long().cumprod(1).bool()
            if common.float().mean() < COMPARABLE:
                continue
            moved = _mean((now.prefill - older.prefill)[common])
            distance = _mean((now.decode - older.prefill)[common])
            if moved > floor and distance < _mean((now.decode - now.prefill)[common]) / 2:
                return f"The engine decodes at {distance:.3g} from its prefill of before updates that moved that by {moved:.3g}."
        if gap > threshold:
            return "The engine's decode differs from its prefill of the same tokens."
        return ""

    def _remember(self, now: _Seen) -> None:
        # While the decode does not change, keep prefill's scores from its last change, so that small movements add up.
        held = bool(self._seen) and _same(self._seen[-1], now)
        if not held and math.isfinite(_mean(now.decode - now.prefill)):
            # Keep the first: a decode that never got an update stays near it.
            self._seen = self._seen[:1] + [*self._seen[1:], now][-HISTORY:]

    def _offer(self, now: _Seen) -> None:
        gap = _mean(now.decode - now.prefill)
        if math.isfinite(gap) and (self._noise is None or gap < self._noise[0]):
            self._noise = (gap, float(now.prefill.std(correction=0)))

    def _scaled_noise(self, now: _Seen) -> float:
        if self._noise is None:
            return math.inf
        gap, spread = self._noise
        return gap * max(1.0, float(now.prefill.std(correction=0)) / spread) if spread > 0 else gap

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able data."""
        return {
            "version": STATE_VERSION,
            "dtype": self.dtype,
            "noise": self._noise,
            "observations": self._observations,
            "seen": [seen.tolist() for seen in self._seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a state of another dtype is ignored, and the check begins anew.

        Raises:
            WeightSyncError: The state is of another version of this package.
        """
        if state.get("version") != STATE_VERSION:
            raise WeightSyncError(
                f"the state of the decode check has version {state.get('version')!r}; allowed: {STATE_VERSION}. Start with a new "
                "checker."
            )
        if state.get("dtype") != self.dtype:
            return
        self._noise = None if state["noise"] is None else (state["noise"][0], state["noise"][1])
        self._observations = int(state["observations"])
        self._seen = [
            _Seen(torch.tensor(tokens, dtype=torch.int64), *(torch.tensor(x, dtype=torch.float64) for x in logprobs))
            for tokens, *logprobs in state["seen"]
        ]


def _seen(decoded: Decoded, prefill: Tensor) -> _Seen:
    """Return all but each row's first token, which cannot be compared, as float64 on the CPU."""
    logprobs = decoded.logprobs
    sampled = decoded.tokens[:, decoded.tokens.shape[1] - logprobs.shape[1] :]
    if not (sampled.shape == logprobs.shape == prefill.shape) or logprobs.shape[1] < 2:
        raise RecordError(
            f"decoded tokens of shape {tuple(sampled.shape)} with log-probabilities of shape {tuple(logprobs.shape)}, and "
            f"prefill's of shape {tuple(prefill.shape)}; allowed: the same shape, at least two tokens per sequence."
        )
    decode, scored = (x.detach().to("cpu", torch.float64)[:, 1:] for x in (logprobs, prefill))
    return _Seen(sampled.detach().cpu()[:, 1:], decode, scored)


def _same(one: _Seen, other: _Seen) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.decode, other.decode)


def _mean(difference: Tensor) -> float:
    """Return the mean absolute difference without the largest tenth; infinity if one is not finite."""
    sizes = difference.abs().flatten()
    if not bool(torch.isfinite(sizes).all()):
        return math.inf
    return float(sizes.sort().values[: len(sizes) - int(LEFT_OUT * len(sizes))].mean())
