"""The miniature demo: a float32 control, the ratio of dtypes, a planted fault that is named and confirmed, and a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_ext.demo import DTYPES, PENALTY
from mismatch_ext.report.page import build_demo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "new"


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What the command prints where there is no terminal, with plotly out of reach."""
    code = "import sys; sys.modules['plotly'] = None; from mismatch_ext.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "demo", "--out", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8").stdout


def test_float32_agrees_and_half_precision_is_apart(printed: str) -> None:
    gaps = {name: float(re.search(rf"│ {name} *│ *(\S+)", printed)[1]) for name in DTYPES}  # type: ignore[index]
    assert gaps["float32"] < 1e-6 < gaps["float16"] < gaps["bfloat16"] / 3


def test_the_planted_fault_is_named_and_confirmed(printed: str, folder: Path) -> None:
    (cause,) = json.loads((folder / "doctor.json").read_text(encoding="utf-8"))["causes"]
    assert (cause["key"], cause["status"]) == ("repetition_penalty", "confirmed")
    assert cause["parameter"] == pytest.approx(PENALTY, abs=1e-3)
    assert f"repetition_penalty {PENALTY}" in printed and "repetition_penalty: 1.0" in printed


def test_the_page_shows_the_bars_and_the_cause_without_scripts(printed: str, folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', page)]
    bfloat16, float16, float32, faulty, mended = widths
    assert float32 < float16 < bfloat16 < faulty and abs(mended - bfloat16) < faulty - bfloat16
    assert f"repetition_penalty {PENALTY}" in page and "confirmed" in page and "<script" not in page


@pytest.mark.parametrize("gaps", [(0.0, 0.0), (1e-3, 1e-3), (0.0, 1.0)])
def test_gaps_that_are_equal_or_zero_are_drawn(
    printed: str, folder: Path, tmp_path: Path, gaps: tuple[float, float]
) -> None:
    shutil.copy(folder / "doctor.json", tmp_path)
    page = build_demo(tmp_path, "", dict(zip(("one", "other"), gaps, strict=True)), "").read_text(encoding="utf-8")
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', page)]
    assert len(widths) == 2 and (widths[0] == widths[1]) == (gaps[0] == gaps[1])
