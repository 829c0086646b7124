"""Which families can be replayed: measured on a tiny random model of each, in the installed transformers.

python -m tests.oracles.routing        prints the table of docs/routing.md
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch

from mismatch_ext.versions import installed
from tests.oracles.routing.proof import CHECKPOINTING, TOLERANCE, Result, prove
from tests.oracles.routing.tiny import families


def family_results() -> list[Result]:
    """Return the result of every family of the installed transformers; a minute or two on one thread."""
    return [prove(family) for family in families()]


def families_page(results: Sequence[Result] | None = None) -> str:
    """Return the table of families in Markdown.

    Args:
        results: What was found; None to find it.
    """
    results = family_results() if results is None else results
    counts = Counter(result.verdict for result in results)
    lines = [
        f"Measured with transformers {installed('transformers')} and torch {torch.__version__.split('+')[0]}: "
        + ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts, reverse=True))
        + ".",
        "",
        "| family | built as | chooses experts in | result | own routing | another routing | interleaved | router gradients |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        router = f"`{result.router}`" if result.router else ""
        verdict = result.verdict + (f": {_short(result)}" if result.note else "")
        slope = ""
        if result.gradient_error is not None:
            # Not the error itself, whose digits depend on the processor.
            slope = f"within {TOLERANCE:g}" if result.gradient_error <= TOLERANCE else "off"
        modes = (_modes(result, check) for check in ("own routing", "another routing", "interleaved"))
        row = (result.name, f"`{result.model}`", router, verdict, *modes, slope)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines)


def _modes(result: Result, check: str) -> str:
    """Return in how many checkpointing modes all checks of a kind held."""
    if not result.held and not result.failed:
        return ""
    held = sum(
        any(name.startswith(check) and name.endswith(f", {mode}") for name in result.held)
        and not any(name.startswith(check) and name.endswith(f", {mode}") for name in result.failed)
        for mode in CHECKPOINTING.values()
    )
    return f"{held}/{len(CHECKPOINTING)}"


def _short(result: Result) -> str:
    """Return a note in one line, without the family's name before it."""
    return re.sub(r"^[\w-]+: ", "", " ".join(result.note.split()))
