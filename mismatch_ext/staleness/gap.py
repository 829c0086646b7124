"""The gap of stale rollouts, and the part of it that is numerics.

v is the version of the weights that sampled a token, w the version that scores it:

    rollout(v) - train(w)  =  rollout(v) - train(v)  +  train(v) - train(w)
    the gap                   numerics                   drift

Tokens of one version, v = w, have no drift: their gap is exactly the numerics. The sources of such tokens, in order:

    batch   tokens of the batch that the scoring weights themselves sampled; they need no extra pass
    buffer  other tokens of the scoring version, which are not trained on

If no source has a token, numerics is unknown, which is not 0. The staleness of tokens does not tell how large the parts are:
regressing the gap on it gave intercepts whose error was several times the numerics.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor

from mismatch_ext.errors import RecordError
from mismatch_ext.metrics import MismatchAccumulator, MismatchSummary
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.staleness.versions import UNKNOWN, staleness

Source = Literal["batch", "buffer"]
SOURCES: tuple[Source, ...] = get_args(Source)
"""Where tokens of one version come from, best first; `numerics/source` is the place in this list, counted from 1."""
ENOUGH = 256
"""Default number of tokens that a source needs for its figure."""
PARTS = ("stale", *SOURCES)
COUNTS = ("tokens", "known", "unknown", "staleness", "mixed")


class StaleGap:
    """Accumulates the gap of rollouts that older weights may have sampled, split into its parts.

        gap = StaleGap()
        gap.add_batch(old, rollout, mask, versions, scoring=w)
        gap.add_buffer(fresh_old, fresh_rollout, fresh_mask)
        metrics = gap.metrics()         # "numerics/k3_kl": ..., or no such name where it is unknown

    Args:
        sampling: Settings that the tokens were sampled with.
        least: Tokens that a source needs for its figure. If no source has this many, the one with most tokens is used.
    """

    def __init__(self, *, sampling: SamplingSettings | None = None, least: int = ENOUGH) -> None:
        if least < 1:
            raise RecordError(f"least={least} must be >= 1 token.")
        self.sampling, self.least = sampling, least
        self._parts = {name: MismatchAccumulator(sampling=sampling) for name in PARTS}
        self._counts = dict.fromkeys(COUNTS, 0)
        self._oldest = 0

    def add_batch(
        self,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        mask: Tensor,
        versions: Tensor,
        *,
        scoring: int,
        comparable: Tensor | None = None,
    ) -> None:
        """Add a batch that is trained on.

        Args:
            old_logprobs: The trainer's log-probabilities at version `scoring` `[B, T]`.
            rollout_logprobs: The engine's log-probabilities, each at the version that sampled the token `[B, T]`.
            mask: True, or 1, at tokens that count `[B, T]`.
            versions: Version that sampled each token, or `UNKNOWN` `[B, T]`.
            scoring: Version of the trainer's weights.
            comparable: True at tokens whose gap is numerics only, if their version is `scoring` `[B, T]`; for replayed routes
                `of_one_version` returns it. None means every token.

        Raises:
            RecordError: A token's version is one that the trainer has not reached yet, or shapes differ.
        """
        mask = mask.bool()
        known = staleness(versions.masked_fill(~mask, UNKNOWN), scoring)
        if len(known) and int(known.min()) < 0:
            raise RecordError(
                f"a token was sampled by weights of version {scoring - int(known.min())}, and the batch is scored by those of "
                f"version {scoring}: the versions of engine and trainer do not count the same."
            )
        same = mask & (versions == scoring)
        numerics = same if comparable is None else same & comparable
        self._counts["mixed"] += int((same & ~numerics).sum())
        self._parts["batch"].update(old_logprobs, rollout_logprobs, numerics)
        self._parts["stale"].update(old_logprobs, rollout_logprobs, mask & ~same)
        self._count(mask=mask, known=known)

    def _count(self, *, mask: Tensor, known: Tensor) -> None:
        tokens = int(mask.sum())
        self._counts["tokens"] += tokens
        self._counts["known"] += len(known)
        self._counts["unknown"] += tokens - len(known)
        self._counts["staleness"] += int(known.sum())
        self._oldest = max(self._oldest, int(known.max()) if len(known) else 0)

    def add_buffer(self, train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> None:
        """Add tokens that are not trained on, scored by the version that sampled them.

        Args:
            train_logprobs: The trainer's log-probabilities `[B, T]`.
            rollout_logprobs: The engine's log-probabilities `[B, T]`.
            mask: True, or 1, at tokens of that version `[B, T]`.
        """
        self._parts["buffer"].update(train_logprobs, rollout_logprobs, mask)

    def tokens(self, source: Source) -> int:
        """Return how many tokens of one version a source gave."""
        return int(self._parts[source].tokens)

    @property
    def source(self) -> Source | None:
        """The first source with enough tokens, otherwise the one with most; None, for unknown numerics, if none has a token."""
        for source in SOURCES:
            if self.tokens(source) >= self.least:
                return source
        most = max(SOURCES, key=self.tokens)
        return most if self.tokens(most) else None

    def numerics(self) -> MismatchSummary | None:
        """Return the measures over tokens of one version; None if they are unknown."""
        return None if self.source is None else self._parts[self.source].compute()

    def merge(self, other: StaleGap) -> None:
        """Add what another accumulator measured, as if its batches had been added to this one."""
        for name, part in other._parts.items():
            self._parts[name].merge(part)
        for name, count in other._counts.items():
            self._counts[name] += count
        self._oldest = max(self._oldest, other._oldest)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain JSON-able data."""
        return {
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "counts": dict(self._counts),
            "oldest": self._oldest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            RecordError: The state has other parts or counts, or parts of another version.
        """
        if set(state.get("parts", ())) != set(PARTS) or set(state.get("counts", ())) != set(COUNTS):
            raise RecordError(
                f"state of a stale gap with parts {sorted(state.get('parts', ()))!r}; expected {sorted(PARTS)}."
            )
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        self._counts, self._oldest = dict(state["counts"]), int(state["oldest"])

    def metrics(self) -> dict[str, float]:
        """Return the values to log, by name without prefix; unknown values are left out."""
        found: dict[str, float] = {}
        if self._counts["known"]:
            found["staleness_mean"] = self._counts["staleness"] / self._counts["known"]
        found["staleness_max"] = float(self._oldest)
        if self._counts["tokens"]:
            mixed = self._counts["mixed"]
            found["same_version_frac"] = (self.tokens("batch") + mixed) / self._counts["tokens"]
            found["mixed_routes_frac"] = mixed / self._counts["tokens"]
            found["unknown_version_frac"] = self._counts["unknown"] / self._counts["tokens"]
        if not self._parts["stale"].is_empty:
            found |= {f"stale/{key}": value for key, value in self._parts["stale"].compute().scalars.items()}
        for source in SOURCES:
            found[f"numerics/{source}/tokens"] = float(self.tokens(source))
            if self.tokens(source):
                scalars = self._parts[source].compute().scalars
                found |= {f"numerics/{source}/{name}": scalars[name] for name in ("logp_abs_diff_mean", "k3_kl")}
        if (summary := self.numerics()) is not None and self.source is not None:
            found |= {f"numerics/{name}": value for name, value in summary.scalars.items()}
            found["numerics/source"] = float(1 + SOURCES.index(self.source))
        return found
