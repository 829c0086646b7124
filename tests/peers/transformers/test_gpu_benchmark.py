"""`benchmarks.gpu`: the command that a GPU runs, on a CPU, with little of everything and in a bare environment."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import experts, faults, ladder, overhead, phantom, sampling, training
from benchmarks.gpu.gap import by_probability, gap
from benchmarks.gpu.miniature import on_grid, step_of
from benchmarks.gpu.page import page
from benchmarks.gpu.part import Setting
from benchmarks.gpu.record import record_of, slug
from benchmarks.gpu.svg import Figure, Panel, Series, svg
from tests.readme import ROOT

# What a machine with torch and transformers alone has not. Not by a blocked import: that would say that it is broken.
BARE = """
import sys
from importlib.machinery import PathFinder
absent = {"vllm", "sglang", "trl", "verl", "ray", "plotly", "matplotlib", "datasets", "accelerate", "peft", "cpuinfo", "pandas"}
plain = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in absent else plain(name, *rest)
)
from benchmarks.gpu.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
SECOND = command.PARTS[1].NAME


def start(out: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    given = ["--device", "cpu", "--quick", "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-c", BARE, *given],
        cwd=ROOT,
        env=env,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A whole run, killed once its second part was written, and started again."""
    out = tmp_path_factory.mktemp("gpu") / "run"
    first = start(out)
    while first.poll() is None and not (out / f"{SECOND}.json").is_file():
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    _, told = first.communicate()
    done = {path.name: path.read_bytes() for path in out.glob("*.json")}
    assert f"{SECOND}.json" in done, told
    second = start(out)
    said, told = second.communicate()
    yield {"out": out, "code": second.returncode, "said": said, "told": told, "before": done}


def found(ran: dict[str, Any], part: Any) -> Any:
    assert ran["code"] == 0, ran["told"]
    return json.loads((ran["out"] / f"{part.NAME}.json").read_text(encoding="utf-8"))["found"]


def test_a_killed_run_goes_on_and_does_nothing_again(ran: dict[str, Any]) -> None:
    assert ran["code"] == 0, ran["told"]
    assert len(ran["before"]) < len(command.PARTS) + 1, "it was killed before it was done"
    for name, content in ran["before"].items():
        # Each result holds its own time and seconds: a second measurement would have others.
        assert (ran["out"] / name).read_bytes() == content
    record = json.loads((ran["out"] / "record.json").read_text(encoding="utf-8"))
    assert list(record["parts"]) == [part.NAME for part in command.PARTS]
    assert record["setting"] | {"device": "cpu", "quick": True} == record["setting"]
    assert record["versions"]["torch"] and record["machine"]["device"] and "points" not in json.dumps(record)
    told = (ran["out"] / "page.md").read_text(encoding="utf-8")
    assert "A quick run" in told and all(f"({file.name})" in told for file in ran["out"].glob("*.svg"))
    assert str(ran["out"] / "record.json") in ran["said"] and not list(ran["out"].glob("*.partial"))


def test_results_of_another_setting_are_not_mixed_in(ran: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="holds results with {'seed': 0}"):
        command.main(["--device", "cpu", "--quick", "--seed", "1", "--out", str(ran["out"])])


def test_every_figure_is_drawn(ran: dict[str, Any]) -> None:
    for part in command.PARTS:
        for name in part.figures(found(ran, part)):
            drawn = ET.parse(ran["out"] / f"{part.NAME}_{name}.svg").getroot()
            assert drawn.tag.endswith("svg") and len(list(drawn)) > 10


@pytest.mark.numeric
def test_float32_decode_is_the_float32_forward_pass(ran: dict[str, Any]) -> None:
    told = found(ran, ladder)
    assert told["oracle"]["holds"] and 0 < told["oracle"]["mean |float32 - float64|"] < 1e-4
    assert set(told["rungs"]) == set(ladder.RUNGS)
    errors = {name: rung["engine's error"] for name, rung in told["rungs"].items()}
    # Three more bits of mantissa: an eighth, and half of that to be sure.
    assert errors["FP16"] < errors["bf16"] / 4 and errors["float32"] < errors["FP16"] / 4
    # Keys and values to 3 bits of mantissa, where bf16 has 7.
    assert errors["bf16, e4m3 KV cache"] > errors["bf16"]


@pytest.mark.numeric
def test_masks_bring_the_ratio_to_one(ran: dict[str, Any]) -> None:
    for name, row in found(ran, sampling)["ratios"].items():
        if name.endswith("float32"):
            assert row["mean |d|, with mask"] < 1e-4 and row["mean ratio, with mask"]["value"] == pytest.approx(
                1, abs=1e-4
            )
            truncated = not name.startswith("none")
            # Without a mask it is the mass that the truncation kept.
            assert (row["mean ratio, without mask"]["value"] < 0.999) == truncated, name
    kept = found(ran, sampling)["ratios"]["top_p 0.8, float32"]["mean ratio, without mask"]["value"]
    assert 0.8 - 1e-4 <= kept < 1


@pytest.mark.numeric
def test_replay_runs_the_engines_experts(ran: dict[str, Any]) -> None:
    for name, rows in found(ran, experts)["dtypes"].items():
        assert rows["routes of the replayed pass that are the engine's"] == 1.0, name
        assert rows["routes"]["routing/compared_tokens"] > 0
    exact = found(ran, experts)["dtypes"]["float32"]
    assert exact["routes"]["routing/token_mismatch_frac"] == 0 and exact["replay"]["mean |d|"]["value"] < 1e-4


@pytest.mark.numeric
def test_a_fault_is_named(ran: dict[str, Any]) -> None:
    told = found(ran, faults)
    assert set(told["faults"]) == set(faults.QUICK) and told["planted"] == len(faults.QUICK)
    row = told["faults"]["temperature 0.9"]
    assert row["named"] and row["causes"] == ["temperature"], row


@pytest.mark.numeric
def test_nothing_is_clipped_without_a_mismatch(ran: dict[str, Any]) -> None:
    told = found(ran, phantom)
    assert set(told["arms"]) == set(phantom.ARMS)
    # One update per rollout, and both sides compute with the same weights in the same dtype.
    assert told["arms"]["matched"]["tokens clipped with no policy change"] == 0
    assert told["arms"]["no clip"]["tokens clipped with no policy change"] == 0
    assert told["arms"]["bypass"]["largest k3"] > told["arms"]["matched"]["largest k3"]


def test_costs_are_of_equal_results(ran: dict[str, Any]) -> None:
    for name, row in found(ran, overhead)["rows"].items():
        assert row["time of ours over theirs"] > 0 and row["equal"], name
        assert row["peak memory of ours over theirs"] is None, "nobody counts them on a CPU"


@pytest.mark.numeric
def test_training_has_a_gap_in_half_precision_alone(ran: dict[str, Any]) -> None:
    arms = found(ran, training)["arms"]
    k3 = {name: arm["k3, mean over steps"] for name, arm in arms.items()}
    assert k3["float32"] < k3["FP16"] < k3["bf16"]


# Without a run.


def test_figures_of_a_gap_are_those_of_its_tokens() -> None:
    engine = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], dtype=torch.float64)
    trainer = engine + torch.tensor([[0.1, -0.3], [0.5, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    told = gap(engine, trainer, mask)
    assert told["mean |d|"]["value"] == pytest.approx(0.3) and told["tokens"] == 3
    expected = sum(math.expm1(d) - d for d in (0.1, -0.3, 0.5)) / 3
    assert told["k3"]["value"] == pytest.approx(expected)
    assert told["root mean square"] == pytest.approx(math.sqrt((0.01 + 0.09 + 0.25) / 3))
    assert told["outside of 0.8 to 1.25"] == pytest.approx(2 / 3)
    assert told["F"]["1.25"] == pytest.approx(2 / 3) and told["F"]["1.5"] == pytest.approx(1 / 3)
    profile = by_probability(engine, trainer, mask)
    # Bins are closed above: -1 is of the one below it, with -2.
    assert profile["tokens"] == [2, 1] and profile["log p"] == pytest.approx([-1.5, -3.0])
    assert profile["mean |d|"] == pytest.approx([0.2, 0.5])


def test_a_grid_is_kept_by_dithering() -> None:
    weight = torch.nn.Linear(32, 16).weight
    stored = on_grid(weight.detach(), 4)
    assert torch.equal(on_grid(stored, 4), stored) and len((stored / step_of(stored, 4)).round().unique()) <= 15
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(32, 16, bias=False)})
    with torch.no_grad():
        model["up_proj"].weight.copy_(stored)
    phantom.put_on_grid(model, torch.Generator().manual_seed(0))
    spread = model["up_proj"].weight.detach()
    assert not torch.equal(spread, stored) and torch.allclose(on_grid(spread, 4), stored)


def test_the_clip_stops_what_it_would_move_further() -> None:
    ratio, reward = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, stopped = phantom.objective(ratio.log(), torch.zeros(4), reward, clipped=True)
    assert stopped.tolist() == [True, False, False, True]
    assert loss.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    assert not phantom.objective(ratio.log(), torch.zeros(4), reward, clipped=False)[1].any()


def test_a_figure_is_xml_and_leaves_out_what_an_axis_cannot_show() -> None:
    series = [Series(name="a < b", x=[0.0, 1.0, 10.0], y=[1.0, float("nan"), 100.0])]
    panel = Panel(title="t", x_title="x", y_title="y", series=series, log_x=True, log_y=True)
    drawn = ET.fromstring(svg(Figure(panels=[panel, replace(panel, labels=["one", "two"], log_x=False)])))
    marks = [mark for mark in drawn.iter() if mark.tag.endswith("circle") and float(mark.get("r", "0")) < 4]
    assert len(marks) == 1 + 2
    assert [text.text for text in drawn.iter() if text.text in ("a < b", "one", "two")] == ["one", "two", "a < b"]


def test_a_page_has_a_table_of_what_is_measured_alike() -> None:
    interval = {"value": 0.5, "low": 0.25, "high": 1.0}
    record = record_of(Setting(device="cpu", size="tiny"), "python", {})
    figures = {
        "model": "one",
        "oracle": {"mean |a - b|": 1e-6, "holds": True},
        "rungs": {"bf16": {"mean |d|": interval, "F": {"2": 0.125}, "n": None}, "FP16": {"mean |d|": 0.25}},
    }
    record["parts"] = {"ladder": {"seconds": 1.0, "date": "", "figures": figures}}
    lines = page(record, {"ladder": "gap"}, {"ladder": ["a.svg"]}).splitlines()
    assert lines[lines.index("**rungs**") + 2 :] == [
        "|  | bf16 | FP16 |", "|---|---|---|",
        r"| mean \|d\| | 0.5 (0.25 to 1) | 0.25 |", "| F, 2 | 0.125 |  |", "| n |  |  |",
    ]  # fmt: skip
    assert r"| oracle, mean \|a - b\| | 1e-06 |" in lines and "| model | one |" in lines


def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--parts", "ladder", "overhead", "--model"]
    assert command.main([*given, str(tmp_path / "nothing")]) == 1
    told = capsys.readouterr()
    assert "ladder failed: ConfigError" in told.out + told.err and "ladder is missing" in told.err
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert list(record["parts"]) == ["overhead"]


def test_a_record_is_named_after_the_device() -> None:
    assert slug("NVIDIA H200 (141 GB)") == "nvidia-h200-141-gb"
    record = record_of(Setting(device="cpu", size="tiny"), "python", {})
    assert record["name"].startswith("gpu-") and record["commit"] and record["seconds"] == 0


def test_the_page_names_the_records_of_gpus() -> None:
    told = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    records = sorted((ROOT / "evidence").glob("gpu-*.json"))
    assert ("no record of a GPU exists yet" in told) == (not records)
    for path in records:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["name"] == path.stem and path.name in told and record["commit"]
        assert not record["setting"]["quick"] and record["setting"]["device"] != "cpu"


def test_a_gpu_that_is_not_there_is_said(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="sees no GPU; give --device cpu --quick"):
        command.main(["--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()
