"""Completions that took several calls of the engine: the calls' records, joined and compared with the row that is trained on.

A turn is one call of the engine. The engine is given the completion so far, with the output of tools or an environment, and
samples from there. The trainer trains on one row of tokens. Every token of the row that counts as the policy's must have been
sampled by a turn, after exactly the tokens that the turn was given.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_ext.errors import MismatchError, RecordError, RoutingError
from mismatch_ext.rollout import (
    Flags,
    Ids,
    Logprobs,
    RolloutRecord,
    one_provenance,
    to_flags,
    to_ids,
    to_logprobs,
)
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.sampling_mask import TokenSupport

TOLERANCE = 1e-5
"""Allowed difference, in nats, between the engine's log-probability of a token and the trained one: room for a float32 cast."""
REMEDY = (
    "Generate by the trainer's own means (in TRL trainer.vllm_generation), keep every turn and the token ids that it sampled (a "
    "chat template that renders earlier turns again tokenizes them anew), and mask what the policy has not sampled."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """One completion of T tokens as it is to be trained on; give lists, arrays or tensors, it holds arrays."""

    prompt_ids: Ids
    response_ids: Ids  # `[T]`
    response_mask: Flags  # True where a token counts as the policy's `[T]`
    rollout_logprobs: Logprobs | None = None  # nats `[T]`, NaN where the host does not know one; None if it keeps none

    def __post_init__(self) -> None:
        where = "a completion"
        object.__setattr__(self, "prompt_ids", to_ids(self.prompt_ids, where))
        object.__setattr__(self, "response_ids", to_ids(self.response_ids, where))
        object.__setattr__(self, "response_mask", to_flags(self.response_mask, where))
        if self.rollout_logprobs is not None:
            object.__setattr__(self, "rollout_logprobs", to_logprobs(self.rollout_logprobs, where))

    @property
    def token_ids(self) -> Ids:
        """Token ids of prompt and response."""
        return np.concatenate([self.prompt_ids, self.response_ids])


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The joined turns of a batch."""

    records: list[RolloutRecord]  # one per completion, in order; tokens that no turn sampled are masked
    turns: int  # that are part of a completion
    sampled_rows: int  # rows of routes that were recorded when their tokens were sampled
    prefilled_rows: int  # rows that a turn's prefill recorded: prompts, tool output, the last token before
    rerouted_rows: int  # times that a later turn's prefill chose other experts for such a row


def join_turns(
    turns: Sequence[RolloutRecord], trained: Sequence[Trained], *, limit: int | None = None, every_turn: bool = True
) -> Joined:
    """Join the engine's answers, in the order of the calls, into one record for each completion.

    Each row of routes comes from the turn that computed it first, so that a sampled token keeps the experts that it was
    sampled with. A completion may end inside its last turn: with `limit`, only one of that many tokens. With `every_turn`, each
    turn must be part of a completion; otherwise other candidates and calls are ignored. A completion has the fault of its
    first turn that has one. Raises RecordError or RoutingError.
    """
    return match_turns(turns, trained, limit=limit).join(every_turn=every_turn)


def match_turns(turns: Sequence[RolloutRecord], trained: Sequence[Trained], *, limit: int | None = None) -> Matched:
    """Give each completion the turns that sampled it, as far as there are any; the arguments are those of `join_turns`."""
    rows = [_Completion(name, completion, limit) for name, completion in enumerate(trained)]
    waiting: _Waiting = defaultdict(list)
    for number, turn in enumerate(turns):
        waiting[len(turn.prompt_ids)].append((number, turn))
    for row in rows:
        row.take_from(waiting)
    left = [turn for _, turn in sorted(chain.from_iterable(waiting.values()), key=lambda numbered: numbered[0])]
    return Matched(rows=rows, left=left)


@dataclass(frozen=True, kw_only=True, eq=False)
class Fork:
    """Where a completion is not what was sampled: the tokens of a turn, and those that should have begun with them."""

    earlier: tuple[Ids, Ids]  # prompt and response
    later: Ids


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Completions with the turns that sampled them, and the turns that no completion has."""

    rows: list[_Completion]
    left: list[RolloutRecord]

    def join(self, *, every_turn: bool = True) -> Joined:
        """Return the records of the completions; see `join_turns`."""
        for row in self.rows:
            row.expect_covered(self.left)
        for _, message in _dropped(self.rows, self.left, every_turn):
            raise RecordError(message)
        return self._joined(self.rows)

    def join_each(self) -> Iterator[Joined | MismatchError]:
        """Yield for each completion its record, or why its turns cannot be joined; the fault of one is not that of others."""
        dropped: dict[int, str] = {}
        for name, message in _dropped(self.rows, self.left, every_turn=False):
            dropped.setdefault(name, message)
        for row in self.rows:
            try:
                row.expect_covered(self.left)
                if row.name in dropped:
                    raise RecordError(dropped[row.name])
                yield self._joined([row])
            except MismatchError as error:
                yield error

    def has_one_version(self, number: int) -> bool:
        """Tell whether the turns of a completion were sampled with one version of the weights."""
        return len({turn.provenance.weight_version for turn, _ in self.rows[number].turns}) <= 1

    @staticmethod
    def _joined(rows: Sequence[_Completion]) -> Joined:
        counts: Counter[str] = Counter()
        return Joined(
            records=[_record(row, counts) for row in rows],
            turns=sum(len(row.turns) for row in rows),
            sampled_rows=counts["sampled"],
            prefilled_rows=counts["prefilled"],
            rerouted_rows=counts["rerouted"],
        )

    def forks(self) -> list[Fork | None]:
        """Return for each completion with a token of the policy's that no turn sampled there where it forks, if that is known."""
        return [row.fork(self.left) for row in self.rows if row.missing() is not None]

    def misplaced(self) -> tuple[int, int]:
        """Return how many of the policy's tokens no turn sampled where they are trained on, and how many there are."""
        missing = sum(row.unsampled() for row in self.rows)
        return missing, sum(int(row.mask.sum()) for row in self.rows)


def any_asked(turns: Sequence[RolloutRecord], trained: Sequence[Trained]) -> bool:
    """Tell whether any turn was given a completion's prompt; if none was, something else sampled the completions."""
    return any(begins(row.prompt_ids, turn.prompt_ids) for row in trained for turn in turns)


_Waiting = dict[int, list[tuple[int, RolloutRecord]]]
"""Turns, with their numbers, that no row has taken yet; keyed by prompt length, because a batch may have thousands of turns."""


@dataclass
class _Completion:
    """A completion whose turns are being looked for, each with the number of its sampled tokens that the completion has."""

    name: int
    trained: Trained
    limit: int | None
    turns: list[tuple[RolloutRecord, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.trained.token_ids
        self.mask = np.concatenate([np.zeros(len(self.trained.prompt_ids), np.bool_), self.trained.response_mask])
        self.at = len(self.trained.prompt_ids)  # the first token after the turns so far
        self.ended = False

    def fit(self, turn: RolloutRecord) -> int | None:
        """Return how well a turn continues the row: 0 is best, None means that it does not."""
        start, stop = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.response_ids)
        if self.ended or not self.at <= start <= len(self.tokens):
            return None
        near = min(stop, start + 8, len(self.tokens))  # most other turns differ here, and whole prompts are long
        if not np.array_equal(self.tokens[start:near], turn.response_ids[: near - start]):
            return None
        if not np.array_equal(self.tokens[:start], turn.prompt_ids) or self.mask[self.at : start].any():
            return None
        if not np.array_equal(self.tokens[start:stop], turn.response_ids[: len(self.tokens) - start]):
            return None
        if stop > len(self.tokens):
            may_end = start < len(self.tokens) if self.limit is None else len(self.trained.response_ids) == self.limit
            return 2 if may_end else None
        return 0 if stop == len(self.tokens) or not self.mask[stop] else 1

    def take_from(self, waiting: _Waiting) -> None:
        """Take the turns that continue the row, one by one; of equally good ones, take one with the row's log-probabilities."""
        while True:
            last = self.missing()
            fitting = [
                (rank, self._other_logprobs(turn), order, turn)
                for start in range(self.at, (len(self.tokens) if last is None else last) + 1)
                for order, turn in waiting.get(start, ())
                if (rank := self.fit(turn)) is not None
            ]
            if not fitting:
                return
            _, _, order, turn = min(fitting, key=lambda candidate: candidate[:3])
            start = len(turn.prompt_ids)
            waiting[start] = [numbered for numbered in waiting[start] if numbered[0] != order]
            count = min(len(turn.response_ids), len(self.tokens) - start)
            self.turns.append((turn, count))
            self.at, self.ended = start + count, count < len(turn.response_ids)

    def _other_logprobs(self, turn: RolloutRecord) -> bool:
        if self.trained.rollout_logprobs is None:
            return False
        first = len(turn.prompt_ids) - len(self.trained.prompt_ids)
        trained = self.trained.rollout_logprobs[first : first + len(turn.response_ids)]
        return not _near(turn.rollout_logprobs[: len(trained)], trained).all()

    def missing(self) -> int | None:
        """Return the place of the first of the policy's tokens that no turn has sampled so far."""
        left = self.mask[self.at :]
        return self.at + int(left.argmax()) if left.any() else None

    def common(self, turn: RolloutRecord) -> int:
        """Return the number of tokens up to the first that differs from the row's."""
        return shared(turn.token_ids, self.tokens)

    def token(self, place: int) -> str:
        """Name a place in the sequence."""
        first = len(self.trained.prompt_ids)
        return f"token {place - first} of the completion" if place >= first else f"token {place} of the prompt"

    def expect_covered(self, left: Sequence[RolloutRecord]) -> None:
        """Refuse a row if no turn sampled one of the policy's tokens; say where the nearest call differs from the row."""
        missing = self.missing()
        if missing is None:
            return
        message = (
            f"completion {self.name}: {self.token(missing)} (id {self.tokens[missing]}) counts as the policy's, and no call of "
            "the trainer's engine sampled it there."
        )
        place, call = self.nearest(left, missing)
        if call is not None and place < len(call.prompt_ids) + len(call.response_ids):
            did = "was given" if place < len(call.prompt_ids) else "sampled"
            there = f"id {self.tokens[place]} is trained on" if place < len(self.tokens) else "the completion ends"
            token = call.token_ids[place]
            message += f" The nearest call {did} id {token} as {self.token(place)}, where {there}."
        raise RecordError(f"{message} {REMEDY}")

    def nearest(self, left: Sequence[RolloutRecord], missing: int) -> tuple[int, RolloutRecord | None]:
        """Return the call that is most like the row at its first token that no turn sampled, and where the two part."""
        first = len(self.trained.prompt_ids)
        nearest: tuple[bool, int, RolloutRecord | None] = (False, -1, None)
        for turn in left:
            start, common = len(turn.prompt_ids), self.common(turn)
            following = self.tokens[missing : missing + len(turn.response_ids)]
            same = np.array_equal(following, turn.response_ids[: len(following)])
            after_others = first <= common < start and same
            if (after_others or first <= start <= min(missing, common)) and (after_others, common) > nearest[:2]:
                nearest = after_others, common, turn
        _, place, call = nearest
        return place, call

    def fork(self, left: Sequence[RolloutRecord]) -> Fork | None:
        """Return the two texts that part where no turn sampled the row; None if no call is like the row there."""
        missing = self.missing()
        place, call = (0, None) if missing is None else self.nearest(left, missing)
        if missing is None or call is None:
            return None
        if place >= len(call.prompt_ids):  # the row has other tokens than the call sampled
            return Fork(earlier=(call.prompt_ids, call.response_ids), later=self.tokens)
        # The call was given other tokens than the row has.
        prompt = self.trained.prompt_ids
        return Fork(earlier=(prompt, self.tokens[len(prompt) : missing]), later=call.prompt_ids)

    def unsampled(self) -> int:
        """Return how many of the policy's tokens no turn sampled."""
        left = self.mask.copy()
        for turn, count in self.turns:
            start = len(turn.prompt_ids)
            left[start : start + count] = False
        return int(left.sum())


def _dropped(rows: Sequence[_Completion], left: Sequence[RolloutRecord], every_turn: bool) -> Iterator[tuple[int, str]]:
    """Yield turns that continue a completion but are not part of it: the completion's number, and the message of an error."""
    if left and not rows:
        raise RecordError(
            f"{len(left)} turns were sampled and no completion is trained on. Give the completions that hold them."
        )
    for turn in left:
        if not every_turn:
            begun = any(row.turns and _continues(turn, row.turns[0][0]) for row in rows)
            again = any(np.array_equal(taken.prompt_ids, turn.prompt_ids) for row in rows for taken, _ in row.turns)
            if not begun or again:
                continue
        row = max(rows, key=lambda row: row.common(turn))
        yield (
            row.name,
            f"completion {row.name}: a turn was dropped: the engine sampled {len(turn.response_ids)} tokens behind "
            f"{len(turn.prompt_ids)} given ones, of which the completion has the first {row.common(turn)}, and what is trained "
            "on does not have them. Keep every turn that was sampled.",
        )


def _continues(turn: RolloutRecord, earlier: RolloutRecord) -> bool:
    """Whether a turn was given all of another."""
    return begins(earlier.token_ids, turn.prompt_ids)


def begins(beginning: NDArray[Any], whole: NDArray[Any]) -> bool:
    """Tell whether a sequence begins with another."""
    return np.array_equal(whole[: len(beginning)], beginning)


def shared(first: NDArray[Any], second: NDArray[Any]) -> int:
    """Return how many tokens two sequences share from the start."""
    least = min(len(first), len(second))
    differs = first[:least] != second[:least]
    return int(differs.argmax()) if differs.any() else least


def _near(values: Logprobs, others: Logprobs) -> Flags:
    """Tell which log-probabilities are equal but for rounding; one that is unknown, NaN in `others`, is."""
    near: Flags = np.abs(values - others) <= TOLERANCE * np.maximum(1.0, np.abs(values))
    near |= np.isnan(others)
    return near


# The record of a completion: log-probabilities, routes, masks and origin.


def _record(row: _Completion, counts: Counter[str]) -> RolloutRecord:
    """Return the record of a row whose turns have all been found."""
    trained = row.trained
    if not row.turns:
        raise RecordError(f"completion {row.name}: no call of the trainer's engine has sampled any of its tokens.")
    one_provenance(
        (f"completion {row.name}, turn {number}", turn.provenance) for number, (turn, _) in enumerate(row.turns)
    )
    logprobs, sampled = np.zeros(len(trained.response_ids)), np.zeros(len(trained.response_ids), np.bool_)
    for turn, count in row.turns:
        first = len(turn.prompt_ids) - len(trained.prompt_ids)
        logprobs[first : first + count] = turn.rollout_logprobs[:count]
        sampled[first : first + count] = True
    mask = sampled & trained.response_mask
    if all(turn.fault is None for turn, _ in row.turns):  # else some log-probabilities are 0 in place of NaN
        _expect_logprobs(row, logprobs, mask)
    last, count = row.turns[-1]
    # A turn with a fault may lack routes or masks, and the completion is as bad as its first such turn.
    fault = next((turn.fault for turn, _ in row.turns if turn.fault is not None), None)
    is_whole = count == len(last.response_ids)
    return RolloutRecord(
        prompt_ids=trained.prompt_ids,
        response_ids=trained.response_ids,
        rollout_logprobs=logprobs,
        response_mask=mask,
        finish_reason=last.finish_reason if is_whole else "length",
        provenance=last.provenance,
        request_id=str(row.name),
        routing=None if fault is not None else _routing(row, counts),
        support=None if fault is not None else _support(row),
        fault=fault,
    )


def _expect_logprobs(row: _Completion, logprobs: Logprobs, mask: Flags) -> None:
    trained = row.trained.rollout_logprobs
    if trained is None:
        return
    count = min(len(logprobs), len(trained))
    wrong = mask[:count] & ~_near(logprobs[:count], trained[:count])
    if wrong.any():
        place = int(wrong.argmax())
        raise RecordError(
            f"completion {row.name}: token {place} of the completion is trained with log-probability {trained[place]}, and the "
            f"engine reported {logprobs[place]}: log-probabilities have moved against their tokens, or are another model's. Give "
            "those of the call that sampled the token."
        )


def _pieces(row: _Completion) -> Iterator[tuple[RoutingTrace, int, int, int]]:
    """Yield each turn's routes, start and stop of the rows that no earlier turn has, and the first of these that it sampled."""
    at = 0
    for turn, _ in row.turns:
        trace = turn.routing
        if trace is None or trace.start:
            raise RoutingError(
                f"completion {row.name}: a turn's routes are missing from its first token on; all turns need them."
            )
        stop = min(trace.rows, len(row.tokens))
        if stop > at:  # a turn that sampled only the completion's last token adds no row
            yield trace, at, stop, max(len(turn.prompt_ids), at)
            at = stop


def _routing(row: _Completion, counts: Counter[str]) -> RoutingTrace | None:
    if all(turn.routing is None for turn, _ in row.turns):
        return None
    parts: list[RoutingTrace] = []
    for trace, at, stop, sampled in _pieces(row):
        if parts:
            before, again = RoutingTrace.concat(parts).experts, trace.slice(0, at).experts
            differ = before.int().sort(-1).values != again.int().sort(-1).values
            counts["rerouted"] += int(differ.flatten(1).any(1).sum())
        parts.append(trace.slice(at, stop))
        counts["sampled"] += max(stop - sampled, 0)
        counts["prefilled"] += min(sampled, stop) - at
    joined = RoutingTrace.concat(parts)
    if joined.rows < len(row.tokens) - 1:
        raise RoutingError(
            f"completion {row.name}: its last {len(row.tokens) - joined.rows} tokens were never given to the engine, so that "
            "they have no routes. End a completion with what the policy sampled, or remove mismatch.routing."
        )
    return joined


def _support(row: _Completion) -> TokenSupport | None:
    supports = [turn.support for turn, _ in row.turns]
    if all(support is None for support in supports):
        return None
    parts, at = [], len(row.trained.prompt_ids)
    for (turn, count), support in zip(row.turns, supports, strict=True):
        if support is None:
            raise RecordError(f"completion {row.name}: a turn has no sampling masks; all turns need them.")
        parts += [TokenSupport.empty(len(turn.prompt_ids) - at, support.vocabulary), support.slice(0, count)]
        at = len(turn.prompt_ids) + count
    return TokenSupport.joined([*parts, TokenSupport.empty(len(row.tokens) - at, parts[0].vocabulary)])


# Sampling masks of rows whose calls have no records.


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of the engine. `support` holds what each token was sampled from, or why it is unknown; None if nobody asked."""

    prompt_ids: Ids
    response_ids: Ids
    rollout_logprobs: Logprobs  # empty if the engine reported none
    support: TokenSupport | str | None = None


class Calls:
    """The calls of the engine for one conversation; each stores the tokens that it was given and the call before did not have."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Call]] = []
        self._last = to_ids((), "")

    def add(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        rollout_logprobs: Sequence[float] | None,
        support: TokenSupport | str | None = None,
    ) -> None:
        """Note a call; the arguments are those of `Call`, with None if there are no log-probabilities."""
        where = "a call of the engine"
        prompt, response = to_ids(prompt_ids, where), to_ids(response_ids, where)
        logprobs = to_logprobs(() if rollout_logprobs is None else rollout_logprobs, where)
        same = shared(self._last, prompt)
        call = Call(prompt_ids=prompt[same:], response_ids=response, rollout_logprobs=logprobs, support=support)
        self._calls.append((same, call))
        self._last = np.concatenate([prompt, response])

    def __iter__(self) -> Iterator[Call]:
        last = to_ids((), "")
        for same, call in self._calls:
            prompt = np.concatenate([last[:same], call.prompt_ids])
            yield replace(call, prompt_ids=prompt)
            last = np.concatenate([prompt, call.response_ids])


def masks_of(name: str, row: Trained, calls: Calls) -> TokenSupport:
    """Return the ids that each token of a row's response was sampled from; none where the policy sampled nothing.

    If several calls were given the same tokens, the mask comes from the one whose log-probabilities and tokens the row has,
    because another may have sampled the same token with other weights. Raises RecordError.
    """
    first, tokens = len(row.prompt_ids), row.token_ids
    parts: list[TokenSupport] = []
    at = first
    for call in sorted(calls, key=lambda call: (len(call.prompt_ids), *_distance(row, call))):
        start = len(call.prompt_ids)
        if not np.array_equal(call.prompt_ids, tokens[:start]):
            continue
        stop, begin = start + shared(call.response_ids, tokens[start:]), max(at, start)
        if stop <= begin or not row.response_mask[begin - first : stop - first].any():
            continue
        if not isinstance(support := call.support, TokenSupport):
            raise RecordError(support or f"completion {name}: the engine sent no sampling masks with its answer.")
        parts += [TokenSupport.empty(begin - at, support.vocabulary), support.slice(begin - start, stop - start)]
        at = stop
    if not parts and row.response_mask.any():
        raise RecordError(
            f"completion {name}: no call of the engine has sampled its tokens, so that they have no sampling masks."
        )
    vocabulary = parts[0].vocabulary if parts else 1
    joined = TokenSupport.joined([*parts, TokenSupport.empty(len(tokens) - at, vocabulary)])
    joined.check_sampled(row.response_ids, row.response_mask, name)
    return joined


def _distance(row: Trained, call: Call) -> tuple[int, int]:
    """Return how many of a call's tokens the row has with another log-probability, then minus how many it has."""
    start = len(call.prompt_ids)
    place, same = start - len(row.prompt_ids), shared(call.response_ids, row.token_ids[start:])
    if place < 0 or row.rollout_logprobs is None:  # a call about the row's prompt, or nothing to compare
        return 0, -same
    count = min(same, len(call.rollout_logprobs))
    trained, mask = row.rollout_logprobs[place : place + count], row.response_mask[place : place + count]
    other = mask[: len(trained)] & ~_near(call.rollout_logprobs[: len(trained)], trained)
    return int(other.sum()), -same
