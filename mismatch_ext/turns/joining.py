"""Joining of turns into one record per completion: log-probabilities, routes, masks and origin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from mismatch_ext.errors import RecordError, RoutingError
from mismatch_ext.rollout import RolloutRecord, one_provenance
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.sampling_mask.support import TokenSupport, join
from mismatch_ext.turns.rows import Row, Trained, by_length, expect_none_dropped, expect_one_version, moved, near


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The joined turns of a batch.

    Attributes:
        records: One record per completion, in order; tokens that no turn sampled are masked.
        turns: Number of turns that are part of a completion.
        unused: Number of turns that are part of no completion.
        sampled_rows: Rows of routes that were recorded when their tokens were sampled.
        prefilled_rows: Rows of routes that a turn's prefill recorded: prompts, tool output, the previous turn's last token.
        rerouted_rows: Rows of either kind for which a later turn's prefill chose other experts; counted for each such turn.
    """

    records: list[RolloutRecord]
    turns: int
    unused: int
    sampled_rows: int
    prefilled_rows: int
    rerouted_rows: int


def join_turns(
    turns: Sequence[RolloutRecord], trained: Sequence[Trained], *, limit: int | None = None, every_turn: bool = True
) -> Joined:
    """Join the records of turns into one record for each completion.

    Each row of routes comes from the turn that computed it first. A sampled token thus keeps the experts that it was sampled
    with, not those that a later turn chose when it prefilled the token again.

    Args:
        turns: The engine's answers, in the order of the calls.
        trained: The completions.
        limit: Largest number of tokens of a completion. A completion of this length may end inside its last turn, or before
            the tokens which that turn sampled. With None, any completion may end inside a turn.
        every_turn: Whether each turn must be part of a completion. Otherwise turns that are part of none are ignored, for
            example other candidates for a turn, and calls about something else.

    Raises:
        RecordError: A trained token was not sampled at its place, a turn was given other tokens than are trained on, or a
            turn was dropped; names completion, turn, token and ids.
        RecordError: Two turns of a completion have different weights or settings; names both.
        RoutingError: Tokens at the end of a completion were never given to the engine and have no routes.
    """
    rows = [Row(name, one, limit) for name, one in enumerate(trained)]
    waiting = by_length(turns)
    for row in rows:
        row.take_from(waiting)
    left = [turn for _, turn in sorted(chain.from_iterable(waiting.values()), key=lambda one: one[0])]
    for row in rows:
        row.expect_covered(left)
    expect_none_dropped(rows, left, every_turn)
    counts = _Counts()
    records = [_record(row, counts) for row in rows]
    return Joined(
        records=records,
        turns=sum(len(row.turns) for row in rows),
        unused=len(left),
        sampled_rows=counts.sampled,
        prefilled_rows=counts.prefilled,
        rerouted_rows=counts.rerouted,
    )


@dataclass
class _Counts:
    sampled: int = 0
    prefilled: int = 0
    rerouted: int = 0


def _record(row: Row, counts: _Counts) -> RolloutRecord:
    """Return the record of a row whose turns have all been found."""
    one = row.trained
    if not row.turns:
        raise RecordError(f"completion {row.name}: no call of the trainer's engine has sampled any of its tokens.")
    _expect_one_origin(row)
    logprobs, sampled = [0.0] * len(one.response_ids), [False] * len(one.response_ids)
    for turn, kept in row.turns:
        first = len(turn.prompt_ids) - len(one.prompt_ids)
        logprobs[first : first + kept] = turn.rollout_logprobs[:kept]
        sampled[first : first + kept] = [True] * kept
    mask = tuple(ours and theirs for ours, theirs in zip(sampled, one.response_mask, strict=True))
    _expect_logprobs(row, logprobs, mask)
    last, kept = row.turns[-1]
    return RolloutRecord(
        prompt_ids=one.prompt_ids,
        response_ids=one.response_ids,
        rollout_logprobs=tuple(logprobs),
        response_mask=mask,
        finish_reason=last.finish_reason if kept == len(last.response_ids) else "length",
        provenance=last.provenance,
        request_id=str(row.name),
        routing=_routing(row, counts),
        support=_support(row),
    )


def _expect_one_origin(row: Row) -> None:
    expect_one_version(row.name, [turn.provenance.weight_version for turn, _ in row.turns])
    one_provenance(
        (f"completion {row.name}, turn {number}", turn.provenance) for number, (turn, _) in enumerate(row.turns)
    )


def _expect_logprobs(row: Row, found: Sequence[float], mask: Sequence[bool]) -> None:
    for place, (ours, theirs, counted) in enumerate(zip(found, row.trained.rollout_logprobs or (), mask, strict=False)):
        if counted and not near(ours, theirs):
            raise moved(row.name, place, ours, theirs)


def _pieces(row: Row) -> Iterator[tuple[RoutingTrace, int, int, int]]:
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


def _routing(row: Row, counts: _Counts) -> RoutingTrace | None:
    if all(turn.routing is None for turn, _ in row.turns):
        return None
    parts: list[RoutingTrace] = []
    for trace, at, stop, sampled in _pieces(row):
        if parts:
            before, again = RoutingTrace.concat(parts).experts, trace.slice(0, at).experts
            differ = before.int().sort(-1).values != again.int().sort(-1).values
            counts.rerouted += int(differ.flatten(1).any(1).sum())
        parts.append(trace.slice(at, stop))
        counts.sampled += max(stop - sampled, 0)
        counts.prefilled += min(sampled, stop) - at
    joined = RoutingTrace.concat(parts)
    if joined.rows < len(row.tokens) - 1:
        raise RoutingError(
            f"completion {row.name}: its last {len(row.tokens) - joined.rows} tokens were never given to the engine, so that "
            "they have no routes. End a completion with what the policy sampled, or remove mismatch.routing."
        )
    return joined


def _support(row: Row) -> TokenSupport | None:
    supports = [turn.support for turn, _ in row.turns]
    if all(support is None for support in supports):
        return None
    parts, at = [], len(row.trained.prompt_ids)
    for (turn, kept), support in zip(row.turns, supports, strict=True):
        if support is None:
            raise RecordError(f"completion {row.name}: a turn has no sampling masks; all turns need them.")
        parts += [TokenSupport.empty(len(turn.prompt_ids) - at, support.vocabulary), support.slice(0, kept)]
        at = len(turn.prompt_ids) + kept
    return join([*parts, TokenSupport.empty(len(row.tokens) - at, parts[0].vocabulary)])
