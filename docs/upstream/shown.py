"""What a script of this folder is run by: with or without this package's workaround, one after the other in one process.

`python -m docs.upstream.NAME [--with-workaround]` runs one. Its exit status says whether the fault is seen.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from docs.upstream.scripts import read
from mismatch_ext.errors import MismatchError
from mismatch_ext.versions import installed

HOLDS, FAILED, MENDED, NOT_INSTALLED = 0, 1, 3, 4
"""Exit status: the fault is seen, the script broke (as where upstream has other names now), no fault, or no such peer."""
WORDS = {HOLDS: "holds", FAILED: "failed", MENDED: "fixed", NOT_INSTALLED: "not installed"}


@dataclass(frozen=True)
class Shown:
    """What one run of a script found.

    Args:
        script: Its name.
        peer: Whose fault it is.
        version: The peer's installed version; None where it is not installed.
        workaround: Whether this package's workaround was applied.
        status: HOLDS, FAILED, MENDED or NOT_INSTALLED.
        expected: The figure without the fault, as text.
        seen: The figure that was seen, as text.
        seconds: What the run took, imports apart.
    """

    script: str
    peer: str
    version: str | None
    workaround: bool
    status: int
    expected: str = ""
    seen: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        found = f"expected {self.expected}, seen {self.seen}: " if self.seen else ""
        how = " with the workaround" if self.workaround else ""
        return f"{self.script}, {self.peer} {self.version or ''}{how}: {found}{WORDS[self.status]}"


def show(name: str, script: Mapping[str, Any], workaround: bool) -> Shown:
    """Run a script's check, and compare the figure with the one that is expected.

    Args:
        name: The script's name.
        script: Its names: PEER, EXPECTED, `seen` and `with_workaround`.
        workaround: Whether to run the latter.
    """
    peer = script["PEER"]
    begun = time.monotonic()
    try:
        found = script["with_workaround" if workaround else "seen"]()
        fine = same(found, script["EXPECTED"])
    except MismatchError as refusal:
        if not workaround:
            raise
        # Where nothing can be mended from outside, this package ends the run before it goes wrong.
        found, fine = f"refused: {type(refusal).__name__}", True
    return Shown(
        name,
        peer,
        installed(peer),
        workaround,
        MENDED if fine else HOLDS,
        text(script["EXPECTED"]),
        text(found),
        round(time.monotonic() - begun, 2),
    )


def same(found: Any, expected: Any) -> bool:
    """Tell whether two figures are one to a thousandth, or two texts are equal."""
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(found, expected, rel_tol=1e-3, abs_tol=0.0 if expected else 1e-6)
    return bool(found == expected)


def text(figure: Any) -> str:
    """Return a figure with four digits, a text as it is."""
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)


def main(script: Mapping[str, Any]) -> None:
    """Run the script that is the program, print what is expected and seen, and exit with what that says."""
    options = argparse.ArgumentParser(description=script["__doc__"])
    options.add_argument("--with-workaround", action="store_true", help="apply this package's workaround first")
    name = script["__spec__"].name.rpartition(".")[2]
    shown = show(name, script, options.parse_args().with_workaround)
    print(shown)
    sys.exit(shown.status)


def run_here(names: list[str]) -> list[Shown]:
    """Run scripts in this process, each without the workaround and then with it; one that breaks leaves the others alone."""
    results = []
    for name in names:
        for applied in (False, True):
            try:
                results.append(show(name, vars(importlib.import_module(f"docs.upstream.{name}")), applied))
            except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
                missing = isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(
                    ("mismatch_ext", "docs")
                )
                peer, said = read(name).peer, f"{type(error).__name__}: {str(error)[:200]}"
                status = NOT_INSTALLED if missing and installed(peer) is None else FAILED
                results.append(Shown(name, peer, installed(peer), applied, status, seen=said))
    return results


if __name__ == "__main__":
    for one in run_here(sys.argv[1:]):
        print("SHOWN " + json.dumps(asdict(one)), flush=True)
