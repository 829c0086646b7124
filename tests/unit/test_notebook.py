"""examples/quickstart.ipynb: every cell runs in its order, in an empty folder, with what `pip install mismatch-ext` has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/quickstart.ipynb"


def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), space)
    assert (tmp_path / "runs/quickstart/report.html").is_file()
    assert "repetition_penalty 1.05" in capsys.readouterr().out
    half, brain = (space["gaps"][name]["logp_abs_diff_mean"] for name in ("float16", "bfloat16"))
    assert 4 * half < brain < space["faulty"]["logp_abs_diff_mean"] / 2
