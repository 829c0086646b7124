"""`benchmarks.stability`: its page is that of its recorded files, and its runs are what their arms say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.miniature import Language, learn, on_grid
from benchmarks.gpu.svg import svg
from benchmarks.stability import experts, page, train
from benchmarks.stability.arms import ARMS, CONTROLS, EXPERTS, REAL, Arm
from benchmarks.stability.async_arms import ASYNC
from benchmarks.stability.record import RECORDED, RECORDED_ASYNC, RECORDED_REAL, record, recorded
from benchmarks.stability.table import difference, half, halves, table
from tests.readme import ROOT


@pytest.fixture(scope="module")
def base() -> train.Base:
    """A small one whose responses end, so that there is something to learn from."""
    model, _, shape = train.base(512, quick=True)
    language = Language(shape.vocabulary, "cpu", hazard=0.2)
    learn(model, language, 20, torch.Generator().manual_seed(0))
    return model, language, shape


def test_page_and_figure_are_those_of_the_recorded_files() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.page(text) == text, "run python -m benchmarks.stability --page"
    assert page.DRAWN.read_text(encoding="utf-8") == svg(page.figure(recorded()[1]))


def test_every_arm_is_recorded_with_its_seeds() -> None:
    for file, arms in ((RECORDED, {**ARMS, **EXPERTS}), (RECORDED_REAL, REAL), (RECORDED_ASYNC, ASYNC)):
        on, runs = recorded(file)
        assert {name: set(seeds) for name, seeds in runs.items()} == {
            name: set(range(1, 1 + arm.seeds))
            for name, arm in arms.items()  # type: ignore[attr-defined]
        }
        assert on["cpu"] and on["date"] and on["commit"] and on["versions"]["torch"]
    assert set(CONTROLS) <= {*ARMS, *EXPERTS, *REAL} and set(CONTROLS.values()) <= {*ARMS, *EXPERTS, *REAL}


def test_without_a_mismatch_nothing_is_stopped_and_no_gap_is_left(base: train.Base) -> None:
    """Both controls, whose engine is in float32 and in int4; and an engine whose grid the checkpoint leaves."""
    for name in ("no mismatch", "matched"):
        curves = train.train(ARMS[name], base, seed=1, steps=3)
        # Decode and forward pass differ by the rounding of what they compute in.
        rounding = torch.finfo(ARMS[name].engine.dtype).eps
        assert max(curves["k3"]) < 10 * rounding**2 * 100 and max(curves["stopped"]) == 0
    off = train.train(ARMS["off the grid"], base, seed=1, steps=3)
    on = train.train(ARMS["bypass"], base, seed=1, steps=1)
    assert off["k3"][0] > 10 * on["k3"][0]


@pytest.mark.parametrize("name", ["bypass", "dithered", "off the grid"])
def test_what_a_run_starts_from(base: train.Base, name: str) -> None:
    arm: Arm = ARMS[name]
    model = train.base(512, quick=True)[0]
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    train.publish(model, arm, torch.Generator().manual_seed(0))
    key = "model.layers.0.mlp.up_proj.weight"
    now, rounded = dict(model.named_parameters())[key].detach(), on_grid(before[key], 4)
    assert torch.equal(now, {"bypass": rounded, "off the grid": before[key]}.get(name, now))
    if arm.dithered:
        assert (now != rounded).float().mean() > 0.8 and torch.equal(on_grid(now, 4), on_grid(rounded, 4))


def test_learning_rate_control_is_active(base: train.Base) -> None:
    plain = train.train(ARMS["bypass"], base, seed=1, steps=4)
    changed = train.train(replace(ARMS["bypass"], period=1), base, seed=1, steps=4)
    assert changed["end_gap"][:1] == plain["end_gap"][:1] and changed["end_gap"][-1] != plain["end_gap"][-1]


def test_replay_leaves_the_routers_own_rounding_alone() -> None:
    base = experts.base(quick=True)
    own, replayed, one = (experts.train(EXPERTS[n], base, seed=1, steps=1) for n in ("own routes", "R3", "one router"))
    assert own["flipped"][0] > 0.1 and replayed["flipped"][0] == own["flipped"][0] and one["flipped"][0] == 0
    assert own["k3"][0] > 3 * replayed["k3"][0] > 3 * one["k3"][0]


def test_steps_to_half_and_differences_are_those_by_hand(tmp_path: Path) -> None:
    assert half({"length": [32.0, 20, 16, 15, 17, 9]}) == 2  # 16, 15 and 17 are 16 in the mean
    assert half({"length": [32.0] * 9}) is None
    curves = {"stopped": [0.1] * 4, "stopped_ends": [0.5] * 4, "advantage_gap": [math.nan, 0.2], "k3": [0.01, 0.02]}
    late, early = {"length": [32.0] * 60, **curves}, {"length": [32.0] * 10 + [2.0] * 5, **curves}
    runs = {"bypass": {1: late, 2: late}, "matched": {1: early, 2: early}}
    assert halves("bypass", runs["bypass"]) == {1: 60, 2: 60} and halves("matched", runs["matched"]) == {1: 9, 2: 9}
    assert difference(runs, "bypass") == (51.0, 0.0) and difference(runs, "matched") is None
    printed = table(runs)
    assert "| >60 >60 | ≥ 60.0 ± 0.0 | +51.0 ± 0.0 (matched) | 10.0 % | 50 % | +0.2 | 0.02 |" in printed
    record(runs, tmp_path / "runs.json")
    assert recorded(tmp_path / "runs.json")[1]["bypass"][1]["length"] == late["length"]


def test_a_run_that_is_finished_is_not_run_again(tmp_path: Path) -> None:
    arguments = ["--quick", "--arms", "bypass", "--seeds", "1", "--out", str(tmp_path)]
    done = tmp_path / "bypass-1.json"
    curves = {name: [1.0] for name in train.MEASURES}
    done.write_text(json.dumps({"arm": "bypass", "seed": 1, "curves": curves}))
    before = done.stat().st_mtime_ns
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.stability", *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert done.stat().st_mtime_ns == before and "| bypass |" in ran.stdout
