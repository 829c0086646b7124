"""The miniature demo: a float32 control, the ratio of dtypes, a planted fault that is named and confirmed, and a page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_ext.demo import DTYPES, PENALTY


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
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert f"repetition_penalty {PENALTY}" in page and "<script" not in page
