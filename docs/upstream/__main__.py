"""Run all scripts of this folder against what is installed, without and with the workaround: `python -m docs.upstream`.

`python -m docs.upstream NAME...` runs those alone.
"""

from __future__ import annotations

import argparse
import sys

from tqdm import tqdm

from docs.upstream.runs import groups, run
from docs.upstream.scripts import SCRIPTS, read
from docs.upstream.shown import FAILED, HOLDS, WORDS, Shown


def main() -> int:
    """Run, print one table, and return 1 where a script broke, or a fault is seen with its workaround."""
    options = argparse.ArgumentParser(prog="python -m docs.upstream", description=__doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help="scripts; all where none is named")
    chosen = options.parse_args()
    unknown = sorted(set(chosen.names) - set(SCRIPTS))
    if unknown:
        options.error(f"no script {unknown[0]!r} in docs/upstream; there are {', '.join(SCRIPTS)}")
    scripts = [read(name) for name in chosen.names or SCRIPTS]
    found: list[Shown] = []
    with tqdm(total=len(scripts), unit="script", file=sys.stderr) as bar:
        for group in groups(scripts):
            bar.set_description(group[0].peer)
            found += run(group)
            bar.update(len(group))
    print(table(found))
    return int(any(one.status == FAILED or one.workaround and one.status == HOLDS for one in found))


def table(found: list[Shown]) -> str:
    """Return one line for each script: what is seen, and whether its workaround still helps."""
    helped = {one.script: one for one in found if one.workaround}
    rows = [("script", "peer", "fault", "expected", "seen", "with our workaround")]
    rows += [
        (
            one.script,
            f"{one.peer} {one.version or ''}",
            WORDS[one.status],
            one.expected,
            one.seen,
            helped[one.script].seen,
        )
        for one in found
        if not one.workaround
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
