"""The findings of `mismatch-ext doctor --turns`, as a section of the report or as a separate page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mismatch_ext.chains.text import chosen, consequence, figures, fix_of, shown, verdict
from mismatch_ext.chains.turns import CAUSES, TURNS_FILE, Break, Chains
from mismatch_ext.log_reading import first_of
from mismatch_ext.report.doctor import files_below
from mismatch_ext.terminal import printable

CHAINS = TypeAdapter(Chains)
LEVELS = {0: "same", 1: "elevated", 3: "large"}
"""Colors of the verdict, by exit status."""


@dataclass(frozen=True, kw_only=True)
class BrokenTurn:
    """A break, in the words of the page."""

    title: str
    place: str
    difference: str  # two lines, or one if a turn's own answer is off
    fix: str


@dataclass(frozen=True, kw_only=True)
class BrokenTurns:
    """What a file says of a log's conversations."""

    name: str
    figures: str
    sentence: str
    level: str
    notes: tuple[str, ...]
    causes: tuple[tuple[str, int, int, int], ...]  # in words, with breaks, conversations and tokens
    breaks: tuple[BrokenTurn, ...]
    left_out: int


def read_turns(directory: str | Path) -> tuple[list[BrokenTurns], list[tuple[str, str]]]:
    """Return what the files in a folder or below it say, and of each that cannot be read its folder and why."""
    found: list[BrokenTurns] = []
    wrong: list[tuple[str, str]] = []
    for path, name in files_below(directory, TURNS_FILE):
        try:
            chains = CHAINS.validate_json(path.read_bytes())
        except ValidationError as error:
            wrong.append((name, f"{TURNS_FILE} is not one of the doctor's: {first_of(error)}"))
        except OSError as error:
            wrong.append((name, f"{TURNS_FILE} cannot be read: {error.strerror or error}"))
        else:
            found.append(_in_words(chains, name))
    return found, wrong


def _in_words(chains: Chains, name: str) -> BrokenTurns:
    printed = chosen(chains.breaks)
    return BrokenTurns(
        name=name,
        figures=figures(chains),
        sentence=verdict(chains),
        level=LEVELS[chains.status],
        notes=tuple(map(_plain, chains.notes)),
        causes=tuple((CAUSES[cause], breaks, talks, tokens) for cause, breaks, talks, tokens in chains.causes()),
        breaks=tuple(map(_break, printed)),
        left_out=len(chains.breaks) - len(printed),
    )


def _break(found: Break) -> BrokenTurn:
    place = f"{found.where}: at {found.place}, token {found.token} of the row{consequence(found)}"
    return BrokenTurn(
        title=_plain(f"conversation {found.conversation}, turn {found.turn}: {found.said}"),
        place=_plain(place),
        difference="\n".join(_difference(found)),
        fix=_plain(fix_of(found)),
    )


def _difference(found: Break) -> Iterator[str]:
    if found.after == found.turn:
        yield f"turn {found.turn}: {shown(found.later)}"
        return
    yield f"- turn {found.after}: {shown(found.earlier)}"
    yield f"+ turn {found.turn}: {shown(found.later)}"


def _plain(text: str) -> str:
    """Return a text whose characters cannot reverse or hide what stands around them."""
    return printable(text, keep="")
