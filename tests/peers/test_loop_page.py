"""The first block of docs/loop.md, as a reader pastes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import ROOT, shell

pytestmark = pytest.mark.engine


def test_the_block_trains_sends_and_ends(tmp_path: Path) -> None:
    block, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/loop.md").read_text(encoding="utf-8"), flags=re.S)
    assert '"runs/mine"' in block
    script = tmp_path / "loop.py"
    script.write_text(block.replace('"runs/mine"', f'"{tmp_path}/run"'), encoding="utf-8")
    said = shell(f"python {script}", PYTHONPATH=str(ROOT))
    assert "no weight update failed" in said, said
    assert len((tmp_path / "run/mismatch/metrics-000.jsonl").read_text(encoding="utf-8").splitlines()) >= 3
