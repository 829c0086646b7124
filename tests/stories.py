"""Runs the commands of a page one after the other, as a reader does, and holds what they print to what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.readme import ROOT
from tests.rendezvous import rendezvous

# Sections that a reader follows from a symptom to a mended run.
STORIES: dict[str, tuple[Path, str]] = {
    title: (ROOT / "docs" / page, title)
    for page, title in (
        ("index.md", "Ten minutes: symptom, doctor, flag, report"),
        ("doctor.md", "TRL samples a nucleus"),
        ("doctor.md", "verl trains a mixture of experts in bf16"),
        ("doctor.md", "A LoRA adapter never reaches the engine"),
    )
}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
LEFT_OUT = "..."


@dataclass(frozen=True, kw_only=True)
class Told:
    """One command of a page.

    Args:
        command: As bash takes it.
        shown: Lines of its output that the page shows, in their order; figures of another machine differ.
    """

    command: str
    shown: tuple[str, ...] = ()


def told(page: Path, heading: str) -> list[Told]:
    """Return the commands of a section, each with the output that the page shows below it."""
    text = page.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    found: list[Told] = []
    for language, block in re.findall(r"```(bash|text)\n(.*?)```", section, flags=re.DOTALL):
        if language == "bash":
            lines = block.replace("\\\n", " ").splitlines()
            found += [Told(command=" ".join(line.split())) for line in lines if line.strip()]
        else:
            shown = tuple(line for line in block.splitlines() if line.strip() not in ("", LEFT_OUT))
            found[-1] = replace(found[-1], shown=shown)
    return found


def figureless(line: str) -> str:
    """Return a line with `#` for each figure and one space for several."""
    return " ".join(NUMBER.sub("#", line).split())


def missing(shown: tuple[str, ...], printed: str) -> Iterator[str]:
    """Yield the lines that a page shows and a command has not printed in that order, figures aside."""
    lines = [figureless(line) for line in printed.splitlines()]
    for line in shown:
        wanted = figureless(line)
        begins = wanted.endswith(LEFT_OUT)
        places = [
            at
            for at, found in enumerate(lines)
            if (found.startswith(wanted.removesuffix(LEFT_OUT)) if begins else found == wanted)
        ]
        if places:
            lines = lines[places[0] + 1 :]
        else:
            yield line


def run(title: str, first: int | None = None) -> None:
    """Run the commands of a story in the checkout, each to the end that the page shows.

    Args:
        title: Of `STORIES`.
        first: How many of them; None for all.
    """
    for step in told(*STORIES[title])[:first]:
        # The doctor's is 1 where causes explain a gap: their remedies are shown then.
        status = 1 if any(line.startswith("to mend ") for line in step.shown) else 0
        printed = printed_by(step.command, status)
        lost = list(missing(step.shown, printed))
        assert not lost, f"{step.command}\n{lost}\nis not in\n{printed}"


def printed_by(command: str, status: int) -> str:
    """Run a command, with the checkout's environment first on the path, and return what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-uo", "pipefail", "-c", command],
        cwd=ROOT,
        env={**os.environ, **rendezvous(), "PATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == status, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout
