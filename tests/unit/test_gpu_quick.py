"""`benchmarks.gpu` in its quick form; its gate, which starts vLLM, is run by tests/peers/test_gate.py."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu import PARTS, main


def test_every_part_is_measured_with_its_control(tmp_path: Path) -> None:
    parts = set(PARTS) - {"gate"}
    assert main(["--device", "cpu", "--quick", "--parts", *parts, "--out", str(tmp_path)]) == 0
    figures = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["figures"]
    written = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert set(figures) == parts and all(figures.values())
    assert all(PARTS[part][0] in written for part in parts)
    for side in {row["compared"] for row in figures["gap"]}:
        gap = {row["engine"]: row["logp_abs_diff_mean"] for row in figures["gap"] if row["compared"] == side}
        # FP16 has eight times the precision of bf16, and float32 far more than either.
        assert 100 * gap["float32 (control)"] < gap["FP16"] < gap["bf16"], side
    assert any("score centering" in row["compared"] for row in figures["costs"])
    control = [row for row in figures["experts"] if row["dtype"] == "float32 (control)"]
    assert len(control) == 2 and all(row["tokens with other experts"] <= 0.01 for row in control)
