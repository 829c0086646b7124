"""An installed package with a planted change, in front on the path: all but the changed files are links to the real ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

Edits = Mapping[str, Sequence[tuple[str, str]]]


def planted(folder: Path, package: str, edits: Edits) -> Path:
    """Lay a changed copy of a package into a folder, which then goes in front on the path.

    Args:
        folder: An empty folder.
        package: Import name of the package.
        edits: By file, as a path inside the package, the texts to replace and their replacements; each text has to be there.

    Returns:
        The folder.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    real = Path(next(iter(spec.submodule_search_locations)))
    _link(real, folder / package, {Path(file).parts: changes for file, changes in edits.items()})
    return folder


def _link(real: Path, place: Path, edits: Mapping[tuple[str, ...], Sequence[tuple[str, str]]]) -> None:
    place.mkdir(parents=True)
    for child in real.iterdir():
        if child.name == "__pycache__":
            continue
        inside = {parts[1:]: changes for parts, changes in edits.items() if parts[0] == child.name}
        if not inside:
            (place / child.name).symlink_to(child)
        elif child.is_dir():
            _link(child, place / child.name, inside)
        else:
            text = child.read_text(encoding="utf-8")
            for old, new in inside[()]:
                assert old in text, f"{child} has no {old!r}: plant another change"
                text = text.replace(old, new)
            (place / child.name).write_text(text, encoding="utf-8")
    missing = {parts[0] for parts in edits} - {child.name for child in real.iterdir()}
    assert not missing, f"{real} has no {missing}"
