"""Walks through conversations: where a turn does not extend the one before, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mismatch_ext.chains.causes import counted_behind_end, explain, flaw_at_end
from mismatch_ext.chains.fixes import try_fixes
from mismatch_ext.chains.turns import (
    CAUSES,
    Break,
    Chains,
    Chat,
    Conversation,
    KnownParts,
    Parts,
    Turn,
    excerpt,
    extends,
    shared_tokens,
)


@dataclass
class _Chain:
    """The tokens that the turns so far share, and which of them were sampled by which turn."""

    answers: list[tuple[int, int, int]] = field(default_factory=list)  # turn, first token, end
    sampled: set[int] = field(default_factory=set)

    def add(self, number: int, turn: Turn) -> None:
        start = len(turn.prompt_ids)
        self.answers.append((number, start, start + len(turn.response_ids)))
        self.sampled.update(start + place for place, counts in enumerate(turn.sampled) if counts)

    def cut(self, token: int) -> int:
        """Forget what was sampled from a token on, and return how many tokens that was."""
        lost = {place for place in self.sampled if place >= token}
        self.sampled -= lost
        self.answers = [(number, start, min(stop, token)) for number, start, stop in self.answers if start < token]
        return len(lost)

    def place(self, token: int) -> str:
        for number, start, stop in self.answers:
            if start <= token < stop:
                return f"token {token - start} of the answer of turn {number}"
        return f"token {token} of the prompt"


def examine(conversations: Iterable[Conversation], chat: Chat, notes: Sequence[str] = ()) -> Chains:
    """Return where the conversations break, and why."""
    parts = KnownParts(chat)
    breaks: list[Break] = []
    turns = sampled = forked = samples = most = by_text = count = 0
    for conversation in conversations:
        count += 1
        found, own = _examined(conversation, chat, parts)
        breaks += found
        turns += len(conversation.turns)
        sampled += sum(sum(turn.sampled) for turn in conversation.turns)
        forked += any(one.forks for one in found)
        samples += own
        most = max(most, own)
        by_text += any(not turn.has_ids for turn in conversation.turns)
    return Chains(
        conversations=count,
        turns=turns,
        forked=forked,
        samples=samples,
        most_samples=most,
        sampled_tokens=sampled,
        misplaced_tokens=sum(found.misplaced for found in breaks),
        by_text=by_text,
        breaks=tuple(breaks),
        notes=tuple(notes),
    )


def _examined(conversation: Conversation, chat: Chat, known: KnownParts) -> tuple[list[Break], int]:
    """Return the breaks of a conversation, and how many training samples it became."""
    breaks: list[Break] = []
    samples = 1
    chain = _Chain()
    for number, turn in enumerate(conversation.turns, start=1):
        parts = known.under({} if turn.request is None else turn.request.settings)
        before = conversation.turns[: number - 1]
        parent = _parent(before, turn)
        if parent is not None and not extends(before[parent - 1], turn):
            found = _broken(conversation, number, parent, chain, chat, parts)
            breaks.append(found)
            samples += 1
        elif parent is not None:
            earlier = before[parent - 1]
            if (cause := flaw_at_end(earlier, turn, parts)) is not None:
                breaks.append(_flaw(conversation, number, parent, cause, chat, parts))
            # A call that goes on from an older turn starts a branch: the turns after that one are not a part of it.
            if parent != number - 1:
                samples += 1
        elif number > 1:
            samples += 1
        chain.add(number, turn)
        if counted := counted_behind_end(turn, chat, parts):
            breaks.append(_counted(conversation, number, counted, chain, chat))
    return breaks, samples


def _parent(before: Sequence[Turn], turn: Turn) -> int | None:
    """Return the number of the turn that a turn extends or should extend; None for the first one, or the first of a branch.

    A prompt that an earlier prompt begins with was sampled from again, which is a branch and no break.
    """
    if not before:
        return None
    if extends(before[-1], turn):
        return len(before)
    fitting = [number for number, earlier in enumerate(before, start=1) if extends(earlier, turn)]
    if fitting:
        return max(fitting, key=lambda number: (len(before[number - 1].ids), number))
    if any(earlier.prompt_ids[: len(turn.prompt_ids)] == turn.prompt_ids for earlier in before):
        return None
    return len(before)


def _broken(conversation: Conversation, number: int, parent: int, chain: _Chain, chat: Chat, parts: Parts) -> Break:
    """Return the break between a turn and the one that it should extend."""
    earlier, later = conversation.turns[parent - 1], conversation.turns[number - 1]
    token = shared_tokens(earlier.ids, later.prompt_ids)
    causes = explain(earlier, later, chat, parts)
    fix, tried = try_fixes(causes, conversation.turns[:parent], later, chat, parts)
    place = chain.place(token)
    first, *others = causes
    further = dict.fromkeys(cause for cause in others if cause != first)
    return Break(
        conversation=conversation.name,
        turn=number,
        after=parent,
        where=later.where,
        cause=first,
        said=CAUSES[first],
        further=tuple(further),
        token=token,
        place=place,
        forks=True,
        misplaced=chain.cut(token),
        earlier=excerpt(chat, earlier.ids, token),
        later=excerpt(chat, later.prompt_ids, token),
        fix=fix,
        tried=tried,
    )


def _flaw(conversation: Conversation, number: int, parent: int, cause: str, chat: Chat, parts: Parts) -> Break:
    """Return an end-of-turn token that is missing or doubled although the later turn extends the earlier one."""
    earlier, later = conversation.turns[parent - 1], conversation.turns[number - 1]
    fix, tried = try_fixes([cause], conversation.turns[:parent], later, chat, parts)
    token = len(earlier.ids)
    return Break(
        conversation=conversation.name,
        turn=number,
        after=parent,
        where=later.where,
        cause=cause,
        said=CAUSES[cause],
        further=(),
        token=token,
        place=f"the end of the answer of turn {parent}",
        forks=False,
        misplaced=0,
        earlier=excerpt(chat, earlier.ids, token),
        later=excerpt(chat, later.prompt_ids, token),
        fix=fix,
        tried=tried,
    )


def _counted(conversation: Conversation, number: int, counted: tuple[int, ...], chain: _Chain, chat: Chat) -> Break:
    """Return the tokens of a turn that count as the policy's although they stand behind the end of an answer."""
    turn = conversation.turns[number - 1]
    start = len(turn.prompt_ids)
    token = start + counted[0]
    chain.sampled.difference_update(start + place for place in counted)
    return Break(
        conversation=conversation.name,
        turn=number,
        after=number,
        where=turn.where,
        cause="tool_text_counted",
        said=CAUSES["tool_text_counted"],
        further=(),
        token=token,
        place=f"token {counted[0]} of the answer of turn {number}",
        forks=False,
        misplaced=len(counted),
        earlier=excerpt(chat, turn.ids[:token], token),
        later=excerpt(chat, turn.ids, token),
        fix=None,
        tried=(),
    )
