"""The page on corrections has the figures that the enumeration of their bias finds."""

from __future__ import annotations

import re

import pytest

from benchmarks.bench_bias import run
from tests.commands import ROOT


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, float]]:
    return {row["name"]: row for row in run()}


def test_the_page_has_these_figures(rows: dict[str, dict[str, float]]) -> None:
    page = (ROOT / "docs/correction.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (.+?) \|" + r" ([\d.]+) \|" * 6 + "$", page, re.MULTILINE)
    assert len(shown) == 16
    for label, *figures in shown:
        name = label.replace("`", "").partition(":")[0]
        found = [
            rows[name][f"{gap} {figure}"] for gap in ("rounding", "large") for figure in ("bias", "pull", "variance")
        ]
        assert [float(figure) for figure in figures] == pytest.approx(found, abs=1e-3), label
