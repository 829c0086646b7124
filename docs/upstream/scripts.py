"""What the scripts of this folder say of themselves, read from their text: most of them cannot be imported everywhere."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
MACHINERY = ("__main__", "runs", "scripts", "shown")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in MACHINERY)
"""Names of the scripts: the peer's, and what is wrong."""


@dataclass(frozen=True)
class Script:
    """One script.

    Args:
        name: Its name.
        says: What is wrong, in a sentence.
        peer: Whose fault it is, a key of `mismatch_ext.versions.PEERS`.
        reported: Link of the issue or pull request, or "not reported".
        workaround: What of this package covers it.
        alone: Whether it starts an engine or another process: such a script has a process for itself.
        lines: Its number of lines.
    """

    name: str
    says: str
    peer: str
    reported: str
    workaround: str
    alone: bool
    lines: int


def read(name: str) -> Script:
    """Return what a script says of itself.

    Args:
        name: One of SCRIPTS.
    """
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    given = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    return Script(
        name=name,
        says=ast.get_docstring(tree) or "",
        peer=given["PEER"],
        reported=given["REPORTED"],
        workaround=given["WORKAROUND"],
        alone=given.get("ALONE", False),
        lines=len(text.splitlines()),
    )
