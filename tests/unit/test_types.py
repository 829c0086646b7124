"""mypy sees what one file of ours hands to another: `make check` runs it, on crossing_types.py too."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MYPY: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]


@pytest.mark.parametrize("folder", ["adapters", "patches"])
def test_the_package_shows_the_folders_beside_it(folder: str) -> None:
    link = ROOT / "mismatch_ext" / folder
    assert link.is_symlink() and link.readlink() == Path("..") / folder, (
        f"{link} is no link to ../{folder}; where git does not make links, set core.symlinks and check the file out again"
    )


def test_mypy_reads_the_package_and_follows_all_imports_of_ours() -> None:
    assert MYPY["files"] == ["mismatch_ext", "tests/oracles", "tests/unit/crossing_types.py"] and "exclude" not in MYPY
    assert "follow_imports" not in MYPY and "ignore_errors" not in MYPY
    for override in MYPY["overrides"]:
        assert not [name for name in override["module"] if name.startswith(("mismatch_ext", "*"))], override


def test_mypy_is_strict() -> None:
    off = {name for name, value in MYPY.items() if value is False}
    assert MYPY["strict"] is True and off == {"disallow_untyped_calls"}
