"""Figures of pages are those of the records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stability.record import RECORDED, RECORDED_REAL, recorded
from benchmarks.stability.table import table
from examples.real_flows import FLOWS

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


def test_the_page_on_precision_quotes_what_two_heads_in_float32_take_off() -> None:
    cases = {case: parts["trl"] for case, parts in evidence("head")["figures"].items()}
    off = {
        (case, name): 1 - found[name] / cases["bf16-bf16"][name]
        for case, found in cases.items()
        for name in ("logp_abs_diff_mean", "k3_kl")
    }
    mean, k3 = (off["float32-float32", name] for name in ("logp_abs_diff_mean", "k3_kl"))
    assert f"took {mean:.0%} off the mean and {k3:.0%} off k3".replace("%", " %") in page("fp16")
    for case in ("bf16-float32", "float32-bf16"):  # "either one alone about half as much"
        assert 0.35 * mean < off[case, "logp_abs_diff_mean"] < 0.65 * mean
        assert 0.35 * k3 < off[case, "k3_kl"] < 0.65 * k3


def test_the_page_on_the_rate_quotes_its_record() -> None:
    text = (ROOT / "evidence/lr_gap.md").read_text(encoding="utf-8")
    last_third, beyond = (
        text.partition(title)[2].partition("\n### ")[0] for title in ("### Last", "### On minus off, b")
    )
    cells = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in last_third.splitlines()
        if row[:1] == "|" and " ± " in row
    ]
    assert len(cells) == 9
    for row in cells:
        quoted = [" ± ".join(f"{float(part):.3f}" for part in cell.split(" ± ")) for cell in row[4:7]]
        assert f"| {' | '.join(quoted)} |" in page("lr"), row
    left = [row.split("|")[5] for row in beyond.splitlines() if " ± " in row]
    rewards = [[f"{float(part):.3f}" for part in cell.partition("(")[0].split("±")] for cell in left]
    assert len(rewards) == 2 and "Left for the mismatch: " + " and ".join(map(" ± ".join, rewards)) in page("lr")


def test_pages_quote_the_recorded_costs() -> None:
    rows, kl, verl = costs("python -m benchmarks"), page("kl"), page("verl")

    def of(words: str) -> dict[str, Any]:
        (found,) = [row for row in rows if words in row["name"]]
        return found

    assert f"Control: torch's scaler takes {of('LossScaler')['ratio']:.2f} times as long as ours" in page("fp16")
    memory, time = of("log_softmax of both: peak memory"), of("log_softmax of both: time")
    assert f"{memory['ours']:.2f} tensors" in kl
    assert f"{memory['theirs']:.1f} tensors and {time['ratio']:.1f} times the time" in kl
    step = 1 / of("checked vs stock, processor time")["ratio"]
    assert f"takes {step:.2f} times stock TRL's processor time" in page("trl")
    for whole in (*costs("python -m benchmarks trl_step"), *costs("python -m benchmarks trl_real")):
        (low, high), (million,) = whole["95 % of it"], re.findall(r"([\d.]+) million", whole["name"])
        words = f"{whole['times stock']:.2f} times with {million} million parameters (95 %: {low:.2f} to {high:.2f}"
        assert words in page("trl"), words
    *small, time, memory = costs("python -m benchmarks verl_scale")
    assert (
        f"take {time['ours']:.2f} s per million tokens on one CPU core, and {memory['ours'] / 1e6:.0f} MB in all"
        in verl
    )
    assert f"verl's own metrics take {time['theirs']:.2f} s per million and {memory['theirs'] / 1e9:.1f} GB" in verl
    assert f"ours take {small[0]['ours']:.2f} s per million and verl's {small[0]['theirs']:.2f} s" in verl


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


def test_the_page_of_a_real_model_quotes_what_upcycling_cost() -> None:
    experts = evidence("real_gap")["figures"]["experts"]
    assert experts["fewest experts in use"] == experts["experts"] == 4
    text = page("real")
    assert f"On {experts['tokens']} tokens that the dense model wrote" in text
    assert f"is {experts['perplexity before']:.1f} before and {experts['perplexity after']:.1f} after" in text
    shares = [
        f"{experts[name]:.0%}".replace("%", " %") for name in ("smallest share of a layer", "largest share of a layer")
    ]
    assert " to ".join(shares) in text


def test_the_page_of_a_real_model_quotes_what_it_learned() -> None:
    right = {
        (row["arm"], row["seed"]): [f"{share:.0%}" for share in row["right"]]
        for row in evidence("real_learning")["figures"]
    }
    bf16, single = (
        "from {} and {} to {} and {}".format(*(right[arm, seed][end] for end in (0, 1) for seed in (0, 1)))
        for arm in ("bf16", "float32")
    )
    said = f"right answers rose {bf16} in bf16, and {single} in float32"
    assert said.replace("%", " %") in page("real")


def test_the_record_of_flows_has_all_of_them_and_none_that_failed() -> None:
    recorded = {flow["name"]: flow["status"] for flow in evidence("real")["figures"]}
    assert list(recorded) == [flow.name for flow in FLOWS]
    assert "passed" in recorded.values() and set(recorded.values()) <= {"passed", "not run"}


def test_the_page_on_corrections_has_the_real_models_figures() -> None:
    written = page("correction")
    for row in evidence("real_centering")["figures"]:
        means = {name: sum(halves) / 2 for name, halves in row["halves"].items()}
        reward = " → ".join(f"{half:.2f}" for half in row["halves"]["reward"])
        figures = f"{means['sampler_bias']:.4f} | {means['gap']:.3f} | {means['k3']:.4f} | {reward}"
        assert f"| {row['arm']} | {row['seed']} | {figures} |" in written
