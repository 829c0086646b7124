"""Figures of pages are those of the records, and `benchmarks.gpu` in its quick form measures what one of them holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu import PARTS, main

ROOT = Path(__file__).resolve().parents[2]


def test_the_quick_form_measures_every_part_with_its_control(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    assert main(command) == 0
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    figures, page = record["figures"], (tmp_path / "page.md").read_text(encoding="utf-8")
    assert set(figures) == set(PARTS) and all(title in page for title, _ in PARTS.values())
    for side in {row["compared"] for row in figures["gap"]}:
        gap = {row["engine"]: row["logp_abs_diff_mean"] for row in figures["gap"] if row["compared"] == side}
        assert gap["float32 (control)"] < 1e-5 < gap["FP16"] < gap["bf16"] < 0.1, side
    control = [row for row in figures["experts"] if row["dtype"] == "float32 (control)"]
    assert [row["tokens with other experts"] for row in control] == [0.0, 0.0]


def recorded(command: str) -> list[dict[str, Any]]:
    """Return the rows of a command in the record of costs."""
    records = json.loads((ROOT / "evidence/bench.json").read_text(encoding="utf-8"))
    (rows,) = [record["figures"] for record in records if record["command"] == command]
    return rows


def test_pages_quote_the_figures_that_take_seconds() -> None:
    fp16, kl = ((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in ("fp16", "kl"))
    rows = recorded("python -m benchmarks quick")
    side = "engine's decode − its own prefill"
    bf16, half, single = (
        f"{row['logp_abs_diff_mean']:.1e}".replace("e-0", "e-")
        for dtype in ("bf16", "FP16", "float32 (control)")
        for row in rows
        if row.get("compared") == side and row["engine"] == dtype
    )
    assert f"{bf16} nats per token in bf16, {half} in FP16. Control, float32: {single}" in fp16
    below = {row["name"].partition(", ")[2]: f"{row['below optimum']:.3f}" for row in rows if "below optimum" in row}
    assert (
        f"k1 in the reward, leave-one-out {below['k1 reward, leave-one-out']}; k3 in the loss {below['k3 loss']}" in kl
    )
    assert f"k2 and k3 in the reward {below['k2 reward']} and {below['k3 reward']}" in kl
    assert f"no KL term {below['none']}, k1 in the loss {below['k1 loss']}" in kl


def test_pages_quote_the_recorded_costs() -> None:
    fp16, kl, trl, verl = (
        (ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in ("fp16", "kl", "trl", "verl")
    )
    rows = recorded("python -m benchmarks")

    def of(words: str) -> dict[str, Any]:
        (found,) = [row for row in rows if words in row["name"]]
        return found

    assert f"Control, torch's: {of('LossScaler')['ratio']:.2f} times the time of ours" in fp16
    memory, seconds = of("log_softmax of both: peak memory"), of("log_softmax of both: time")
    assert f"{memory['ours']:.2f} tensors" in kl
    assert f"{memory['theirs']:.1f} tensors and {seconds['ratio']:.1f} times the time" in kl
    assert f"takes {1 / of('checked vs stock, processor time')['ratio']:.2f} times stock TRL's processor time" in trl
    seconds, size = of("seconds for each million"), of("peak bytes")
    assert f"take {seconds['ours']:.2f} s for a million tokens on one CPU core" in verl
    assert f"{size['ours'] / 1e6:.0f} MB of memory" in verl
    assert f"verl's own metrics take {seconds['theirs']:.2f} s and {size['theirs'] / 1e6:.0f} MB" in verl


def test_the_page_of_the_doctor_quotes_its_recorded_example() -> None:
    record = json.loads((ROOT / "evidence/doctor.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    assert record["command"] in page
    for line in record["figures"]["printed"]:
        assert line in page
