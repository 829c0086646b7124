"""The page of this folder, from what `python -m docs.upstream --page` has found last."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from docs.upstream.scripts import FOLDER, SCRIPTS, read
from docs.upstream.shown import HOLDS, MENDED, WORDS, Shown

PAGE = FOLDER / "README.md"
RECORD = FOLDER / "found.json"
HEAD = """# Faults upstream

Written by `make upstream`. Each script shows one fault of a peer, against the version that is installed, in at most 40 lines:
`seen()` calls the peer's own code and returns the figure, `EXPECTED` is the one without the fault, and `with_workaround()` is the
same with what this package does about it. All above `with_workaround` runs without this package, and can be pasted into an issue.

- `make upstream` runs all of them against the installed stack, without and with the workaround, prints what still holds, and
  writes this page. It ends with status 1 where a workaround does not help any more, or a script broke.
- `python -m docs.upstream NAME...` runs some. `python -m docs.upstream.NAME [--with-workaround]` is one alone: exit status 0
  where the fault is seen, 3 where it is not, as after it was mended upstream.
- A script that says "mended" is the sign that its workaround can go (docs/patches.md says when each patch can).
- "refused" is an error of this package before the run goes wrong, where nothing can be mended from outside.
- "not reported" means that this project has sent no report and knows of none; nobody has looked for each of them.
"""


def record(found: Sequence[Shown]) -> None:
    """Keep what was found of the scripts that could run; what another environment has found of the others stays."""
    kept = recorded()
    for one in found:
        if one.status in (HOLDS, MENDED):
            kept.setdefault(one.script, {})["with" if one.workaround else "without"] = asdict(one)
    ordered = {name: kept[name] for name in SCRIPTS if name in kept}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def recorded() -> dict[str, Any]:
    """Return what the last runs have found, by script."""
    return dict(json.loads(RECORD.read_text(encoding="utf-8"))) if RECORD.exists() else {}


def page(found: Mapping[str, Any]) -> str:
    """Return the page as Markdown.

    Args:
        found: As `recorded` returns it.
    """
    lines = [HEAD]
    lines += ["| script | peer | fault | expected | seen | with our workaround | workaround | reported |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name in SCRIPTS:
        script, pair = read(name), found.get(name)
        if pair is None:  # in no environment so far
            lines.append(
                f"| [{name}]({name}.py): {script.says} | {script.peer} | not run | | | | {script.workaround} | |"
            )
            continue
        stock, ours = pair["without"], pair["with"]
        link = script.reported if script.reported == "not reported" else f"[{script.reported[19:]}]({script.reported})"
        cells = (f"[{name}]({name}.py): {script.says}", f"{script.peer} {stock['version']}", WORDS[stock["status"]])
        cells += (stock["expected"], stock["seen"], ours["seen"], script.workaround, link)
        lines.append(f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |")
    return "\n".join(lines) + "\n"
