"""Figures of pages are those of the records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stability.record import RECORDED, RECORDED_REAL, recorded
from benchmarks.stability.table import table

ROOT = Path(__file__).resolve().parents[2]
SPLITS = ("eval/familiar", "eval/unfamiliar")


def page(name: str) -> str:
    """Return a page as one line, so that a figure may stand at the end of one."""
    return " ".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8").split())


def evidence(name: str) -> Any:
    return json.loads((ROOT / f"evidence/{name}.json").read_text(encoding="utf-8"))


def costs(command: str) -> list[dict[str, Any]]:
    """Return the rows that a command printed."""
    (rows,) = [record["figures"] for record in evidence("bench") if record["command"] == command]
    return rows


def said(found: dict[str, float], digits: str) -> str:
    """Return an interval as pages write it."""
    return f"{found['value']:{digits}} ({found['low']:{digits}} to {found['high']:{digits}})"


def test_pages_quote_the_figures_that_take_seconds() -> None:
    rows = costs("python -m benchmarks quick")
    side = "engine's decode − its own prefill"
    gaps = {row["engine"]: row["logp_abs_diff_mean"] for row in rows if row.get("compared") == side}
    bf16, half, single = (f"{gaps[name]:.1e}".replace("e-0", "e-") for name in ("bf16", "FP16", "float32 (control)"))
    assert f"{bf16} nats per token in bf16, {half} in FP16. Control, float32: {single}" in page("fp16")
    below = {row["name"].partition(", ")[2]: f"{row['below optimum']:.3f}" for row in rows if "below optimum" in row}
    kl = page("kl")
    assert (
        f"k1 in the reward, leave-one-out {below['k1 reward, leave-one-out']}; k3 in the loss {below['k3 loss']}" in kl
    )
    assert f"k2 and k3 in the reward {below['k2 reward']} and {below['k3 reward']}" in kl
    assert f"no KL term {below['none']}, k1 in the loss {below['k1 loss']}" in kl


def test_pages_quote_the_recorded_costs() -> None:
    rows, verl = costs("python -m benchmarks"), page("verl")

    def of(words: str) -> dict[str, Any]:
        (found,) = [row for row in rows if words in row["name"]]
        return found

    assert f"Control: torch's scaler takes {of('LossScaler')['ratio']:.2f} times as long as ours" in page("fp16")
    assert f"{of('log_softmax of both: peak memory')['ours']:.2f} tensors" in page("kl")
    step = 1 / of("checked vs stock, processor time")["ratio"]
    assert f"takes {step:.2f} times stock TRL's processor time" in page("trl")
    for whole in costs("python -m benchmarks trl_step"):
        assert f"{whole['times stock']:.2f} times with" in page("trl")
    *_, time, memory = costs("python -m benchmarks verl_scale")
    assert f"{time['ours']:.2f} s per million tokens on one CPU core, and {memory['ours'] / 1e6:.0f} MB" in verl
    assert f"verl's own metrics take {time['theirs']:.2f} s per million and {memory['theirs'] / 1e9:.1f} GB" in verl


def test_pages_quote_the_recorded_gaps() -> None:
    fp16, routing, replay = page("fp16"), page("routing"), evidence("replay_gap")["figures"]
    for split in SPLITS:
        ratios = evidence("demo_dense")["figures"]["bf16 over fp16"][split]
        assert said(ratios["abs"], ".2g") in fp16 and said(ratios["k3"], ".0f") in fp16
        assert said(replay[split]["left by replay"]["k3"], ".2f") in routing
        assert f"{replay[split]['routing decisions that differ']:.1%}".replace("%", " %") in routing


@pytest.mark.parametrize("file", [RECORDED, RECORDED_REAL], ids=lambda file: file.stem)
def test_the_page_of_stability_has_the_recorded_tables(file: Path) -> None:
    assert table(recorded(file)[1]) in (ROOT / "evidence/stability.md").read_text(encoding="utf-8")


def test_the_page_of_the_doctor_quotes_its_recorded_example() -> None:
    record, written = evidence("doctor"), (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    assert record["command"] in written
    for line in record["figures"]["printed"]:
        assert line in written


# In words of docs/kl.md.
PLACEMENT = {"the loss": "loss", "the reward": "reward", "both": "both", "reward and loss": "both"}


def test_the_page_of_kl_terms_quotes_their_enumeration() -> None:
    record = (ROOT / "evidence/kl.md").read_text(encoding="utf-8")
    enumerated = {}
    for line in record.splitlines():
        if line.startswith(("| token | k", "| sequence | k")):
            target, estimator, placement, _, bias, _, _, _, spread, *_ = line.replace("*", "").strip("| ").split(" | ")
            enumerated[target, estimator, placement] = (bias, spread)
    text = (ROOT / "docs/kl.md").read_text(encoding="utf-8")
    quoted = re.findall(
        r"^\| (k\d) in ([a-z ]+?)(?: \(.*?\))? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, flags=re.M
    )
    assert len(quoted) == 6
    for estimator, words, of_responses, of_tokens, spread in quoted:
        placement = PLACEMENT[words]
        assert enumerated["sequence", estimator, placement] == (of_responses, spread)
        assert enumerated["token", estimator, placement][0] == of_tokens
