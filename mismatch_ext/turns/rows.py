"""Search for the turns that make up a completion, by their tokens; if they do not make it up, an error says what is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from mismatch_ext.errors import RecordError
from mismatch_ext.rollout import RolloutRecord

TOLERANCE = 1e-5
"""Allowed difference, in nats, between the engine's log-probability of a token and the trained one: room for a float32 cast."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One completion as it is to be trained on.

    Args:
        prompt_ids: Token ids of its prompt.
        response_ids: Token ids of the completion `[T]`.
        response_mask: True where a token counts as the policy's `[T]`.
        rollout_logprobs: Log-probabilities that it is trained with, nats `[T]`; None if the host keeps none. An entry is None
            if the host does not know that token's log-probability.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]
    rollout_logprobs: tuple[float | None, ...] | None = None


Waiting = dict[int, list[tuple[int, RolloutRecord]]]
"""Turns, with their numbers, that no row has taken yet; keyed by prompt length, because a batch may have thousands of turns."""


def by_length(turns: Sequence[RolloutRecord]) -> Waiting:
    """Return turns in the form that `Row.take_from` takes."""
    found: Waiting = defaultdict(list)
    for number, turn in enumerate(turns):
        found[len(turn.prompt_ids)].append((number, turn))
    return found


@dataclass
class Row:
    """A completion whose turns are being looked for.

    Args:
        name: Its number.
        trained: The completion.
        limit: As in `join_turns`.

    Attributes:
        turns: The turns found so far, each with the number of its sampled tokens that the completion kept.
        at: Index in the whole sequence of the first token after these turns.
    """

    name: int
    trained: Trained
    limit: int | None
    turns: list[tuple[RolloutRecord, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.trained.prompt_ids + self.trained.response_ids
        self.mask = (False,) * len(self.trained.prompt_ids) + self.trained.response_mask
        self.at = len(self.trained.prompt_ids)
        self.ended = False

    def fit(self, turn: RolloutRecord) -> int | None:
        """Return how well a turn continues the row: 0 is best, None means that it does not."""
        start, stop = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.response_ids)
        if self.ended or not self.at <= start <= len(self.tokens):
            return None
        near = min(stop, start + 8, len(self.tokens))  # most other turns differ here, and whole prompts are long
        if self.tokens[start:near] != turn.response_ids[: near - start] or self.tokens[:start] != turn.prompt_ids:
            return None
        if any(self.mask[self.at : start]) or self.tokens[start:stop] != turn.response_ids[: len(self.tokens) - start]:
            return None
        if stop > len(self.tokens):
            may_end = start < len(self.tokens) if self.limit is None else len(self.trained.response_ids) == self.limit
            return 2 if may_end else None
        return 0 if stop == len(self.tokens) or not self.mask[stop] else 1

    def take_from(self, waiting: Waiting) -> None:
        """Take the turns that continue the row, one by one; of equally good ones, take one with the row's log-probabilities."""
        while True:
            last = next((place for place in range(self.at, len(self.tokens)) if self.mask[place]), len(self.tokens))
            fitting = [
                (rank, self._other(turn), order, turn)
                for start in range(self.at, last + 1)
                for order, turn in waiting.get(start, ())
                if (rank := self.fit(turn)) is not None
            ]
            if not fitting:
                return
            _, _, order, turn = min(fitting, key=lambda one: one[:3])
            start = len(turn.prompt_ids)
            waiting[start] = [one for one in waiting[start] if one[0] != order]
            kept = min(len(turn.response_ids), len(self.tokens) - start)
            self.turns.append((turn, kept))
            self.at, self.ended = start + kept, kept < len(turn.response_ids)

    def _other(self, turn: RolloutRecord) -> bool:
        """Tell whether a turn has other log-probabilities than its place in the row."""
        first = len(turn.prompt_ids) - len(self.trained.prompt_ids)
        given = (self.trained.rollout_logprobs or ())[first:]
        return any(not near(ours, theirs) for ours, theirs in zip(turn.rollout_logprobs, given, strict=False))

    def common(self, turn: RolloutRecord) -> int:
        """Return the number of tokens up to the first that differs from the row's."""
        pairs = zip(turn.prompt_ids + turn.response_ids, self.tokens, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def token(self, place: int) -> str:
        """Name a place in the sequence."""
        first = len(self.trained.prompt_ids)
        return f"token {place - first} of the completion" if place >= first else f"token {place} of the prompt"

    def expect_covered(self, left: Sequence[RolloutRecord]) -> None:
        """Refuse a row if no turn sampled one of the policy's tokens; say which turn should have."""
        missing = next((place for place in range(self.at, len(self.tokens)) if self.mask[place]), None)
        if missing is None:
            return
        number, sampled = len(self.turns), self._sampled_at(missing, left)
        first = len(self.trained.prompt_ids)
        should = [turn for turn in left if first <= len(turn.prompt_ids) <= min(missing, self.common(turn))]
        # The token comes right after a turn, a later turn was given it, and no turn could have sampled it: the mask is wrong.
        given_it = missing == self.at and not should and any(self.common(turn) > missing for turn in left)
        if sampled is not None and not given_it:
            for turn in left:
                if self.common(turn) >= min(len(turn.prompt_ids), missing) and _continues(sampled, turn):
                    raise RecordError(
                        f"completion {self.name}: turn {number} was dropped: the engine sampled {len(turn.response_ids)} tokens "
                        f"behind {self.token(len(turn.prompt_ids) - 1)} and went on from them, and what is trained on goes on "
                        "without them. Keep every turn that a later one was given."
                    )
        # Otherwise, of the turns that should have sampled the token, take the one that shares most with the row.
        nearest = sampled or max(should, key=self.common, default=None)
        if given_it or nearest is None:
            raise RecordError(
                f"completion {self.name}: {self.token(missing)} (id {self.tokens[missing]}) counts as the policy's, but no call "
                "of the trainer's engine has sampled it there. Generate by the trainer's own means (in TRL "
                "trainer.vllm_generation), and mask what the policy has not sampled."
            )
        place = self.common(nearest)
        if place == len(self.tokens):
            raise RecordError(
                f"completion {self.name}: it ends {_length(nearest) - place} tokens before the end of turn {number}, which "
                f"sampled {len(nearest.response_ids)}; allowed: a completion of {self.limit} tokens. Keep every token that was "
                "sampled."
            )
        given, found = (nearest.prompt_ids + nearest.response_ids)[place], self.tokens[place]
        if place < len(nearest.prompt_ids):
            raise RecordError(
                f"completion {self.name}: turn {number} was given another token than is trained on: {self.token(place)} was id "
                f"{given} for the engine and is id {found} in what is trained on. The turns before it were tokenised anew, as a "
                "chat template does that renders them again: append token ids to those of the turns before."
            )
        raise RecordError(
            f"completion {self.name}: {self.token(place)} was changed after turn {number} had sampled it: id {given} by the "
            f"engine, id {found} in what is trained on. A chat template that renders earlier turns again tokenises them anew: "
            "keep the token ids that were sampled."
        )

    def _sampled_at(self, place: int, left: Sequence[RolloutRecord]) -> RolloutRecord | None:
        """Return the turn of the row's prompt that sampled the row's tokens from `place` on, but after other tokens."""
        first = len(self.trained.prompt_ids)
        found = [
            turn
            for turn in left
            if first <= self.common(turn) < len(turn.prompt_ids)
            and self.tokens[place : place + len(turn.response_ids)] == turn.response_ids[: len(self.tokens) - place]
        ]
        return max(found, key=self.common, default=None)


def any_asked(turns: Sequence[RolloutRecord], trained: Sequence[Trained]) -> bool:
    """Tell whether any turn was given a completion's prompt; if none was, something else sampled the completions."""
    return any(turn.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids for one in trained for turn in turns)


def near(ours: float, theirs: float | None) -> bool:
    return theirs is None or abs(ours - theirs) <= TOLERANCE * max(1.0, abs(ours))


def expect_one_version(name: int, versions: Sequence[int | None]) -> None:
    """Refuse a completion whose turns were sampled by several versions of the weights; names the first two."""
    for number, version in enumerate(versions):
        if version != versions[0]:
            raise RecordError(
                f"completion {name}: turn 0 was sampled by weight version {versions[0]}, turn {number} by weight version "
                f"{version}: the engine's weights were updated between them, and no one policy has sampled the completion. "
                "Update weights between batches alone."
            )


def moved(name: int, place: int, ours: float, theirs: float | None) -> RecordError:
    """Return the error for a token that is trained with another log-probability than the engine reported."""
    return RecordError(
        f"completion {name}: token {place} of the completion is trained with log-probability {theirs}, and the "
        f"engine reported {ours}: log-probabilities have moved against their tokens, or are another model's. Give "
        "those of the call that sampled the token."
    )


def _length(turn: RolloutRecord) -> int:
    return len(turn.prompt_ids) + len(turn.response_ids)


def _continues(turn: RolloutRecord, earlier: RolloutRecord) -> bool:
    """Tell whether a turn was given all of another."""
    return turn.prompt_ids[: _length(earlier)] == earlier.prompt_ids + earlier.response_ids


def expect_none_dropped(rows: Sequence[Row], left: Sequence[RolloutRecord], every_turn: bool) -> None:
    """Refuse turns that continue a completion but are not part of it."""
    for turn in left:
        if not every_turn:
            begun = any(row.turns and _continues(turn, row.turns[0][0]) for row in rows)
            if not begun or any(known.prompt_ids == turn.prompt_ids for row in rows for known, _ in row.turns):
                continue
        row = max(rows, key=lambda row: row.common(turn))
        raise RecordError(
            f"completion {row.name}: a turn was dropped: the engine sampled {len(turn.response_ids)} tokens behind "
            f"{len(turn.prompt_ids)} given ones, of which the completion has the first {row.common(turn)}, and what is trained "
            "on does not have them. Keep every turn that was sampled."
        )
