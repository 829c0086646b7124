"""What became of a log's conversations, for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mismatch_ext.chains.turns import CAUSES, UNKNOWN, Break, Chains, Excerpt
from mismatch_ext.terminal import printable

LEVELS = {
    "ids": "token by token",
    "text": "in its text",
    "text_alone": "in its text, while its token ids still differ",
}
LISTED = 12
"""The most breaks that are printed in full; the file has all of them."""


def report(chains: Chains) -> str:
    """Return the figures, a table of causes, the breaks, and a verdict."""
    return "\n".join(_lines(chains))


def _lines(chains: Chains) -> Iterator[str]:
    yield figures(chains)
    yield from (f"seen: {note}" for note in chains.notes)
    if chains.breaks:
        yield from ("", f"{'cause':78} {'breaks':>7} {'conversations':>14} {'tokens':>8}")
    for cause, breaks, conversations, tokens in chains.causes():
        yield f"{CAUSES[cause]:78} {breaks:7,} {conversations:14,} {tokens:8,}"
    printed = chosen(chains.breaks)
    for found in printed:
        yield from ("", *lines_of(found))
    if len(chains.breaks) > len(printed):
        yield from ("", f"{len(chains.breaks) - len(printed):,} more breaks are in the file")
    yield from ("", verdict(chains))


def figures(chains: Chains) -> str:
    """Return the first line: how many conversations fork, and what became of them."""
    share = chains.misplaced_tokens / chains.sampled_tokens if chains.sampled_tokens else 0.0
    forks = f"{chains.forked:,} of {chains.conversations:,} conversations fork ({chains.forked_frac:.0%})"
    samples = f"training samples: {chains.samples:,}, at most {chains.most_samples:,} from one conversation"
    misplaced = f"{chains.misplaced_tokens:,} of {chains.sampled_tokens:,} sampled tokens ({share:.0%})"
    return f"{forks}; {samples}; {misplaced} have log-probabilities that no longer belong to them"


def chosen(breaks: tuple[Break, ...]) -> list[Break]:
    """Return the breaks to print: the first of each cause, then the others, in the order of the log."""
    first: dict[str, int] = {}
    for number, found in enumerate(breaks):
        first.setdefault(found.cause, number)
    others = [number for number in range(len(breaks)) if number not in first.values()]
    numbers = sorted([*first.values(), *others[: max(0, LISTED - len(first))]])
    return [breaks[number] for number in numbers]


def lines_of(found: Break) -> Iterator[str]:
    """Yield a break: its cause, its place, the difference, and what fixes it."""
    yield f"conversation {found.conversation}, turn {found.turn} ({found.where}): {found.said}"
    yield f"  at {found.place}, token {found.token} of the row{consequence(found)}"
    if found.after == found.turn:
        yield f"  answer of turn {found.turn}: {shown(found.later)}"
    else:
        yield f"  - turn {found.after}: {shown(found.earlier)}"
        yield f"  + turn {found.turn}: {shown(found.later)}"
    if found.further:
        yield f"  behind it: {'; '.join(CAUSES[cause] for cause in found.further)}"
    yield f"  {fix_of(found)}"


def consequence(found: Break) -> str:
    """Return how many tokens a break costs."""
    return f"; {found.misplaced:,} sampled tokens are misplaced" if found.misplaced else ""


def shown(excerpt: Excerpt) -> str:
    """Return an excerpt on one line: its text, quoted, and its ids."""
    ids = " ".join(map(str, excerpt.ids))
    return f"{printable(json.dumps(excerpt.text, ensure_ascii=False), keep='')}  ids {ids}"


def fix_of(found: Break) -> str:
    """Return what fixes a break, which was tried; otherwise what was tried in vain."""
    if found.fix is not None:
        return f"to fix: {found.fix.change} (tried: turn {found.turn} then extends turn {found.after} {LEVELS[found.fix.level]})"
    if found.tried:
        return f"no fix found; tried without success: {'; '.join(found.tried)}"
    if found.cause == "tool_text_counted":
        return "no fix can be tried on a log; a mask must leave out what the policy did not sample"
    return "no fix was tried, because the log has no messages to render again"


def verdict(chains: Chains) -> str:
    """Return the last line."""
    unknown = sum(found.cause == UNKNOWN for found in chains.breaks)
    if not chains.breaks:
        return f"Unbroken: each of {chains.turns:,} turns extends the one before, or begins a conversation or a branch."
    if unknown:
        return f"Partly explained: {unknown:,} of {len(chains.breaks):,} breaks have no known cause."
    return f"Explained: each break has a cause ({len(chains.breaks):,} in all)."
