"""Runs of more steps than are kept: the same tables, verdict and closing lines, in memory that does not grow with them."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch_ext import longrun, stream
from mismatch_ext.host_names import Role
from mismatch_ext.longrun import read_long_run
from mismatch_ext.older import STRETCHES, Stretches
from mismatch_ext.report import build, closing_lines, judge, load_runs, summarise, tables
from mismatch_ext.report.figures import sections
from mismatch_ext.report.lines import MAX_POINTS, thinned
from mismatch_ext.report.profiles import pool_profile
from mismatch_ext.rundata import RunData, parse_line, read_run
from mismatch_ext.stream import RunStream
from tests.unit.synthetic_runs import header

ROOT = Path(__file__).parents[2]
FEW, SAMPLED = 40, 8
"""Steps and records that are kept here."""


@pytest.fixture
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep so little that a short run is a long one."""
    monkeypatch.setattr(longrun, "WHOLE", FEW)
    monkeypatch.setattr(longrun, "SAMPLES", SAMPLED)
    monkeypatch.setattr(longrun, "SAID", 5)


def profile(rng: random.Random) -> dict[str, Any]:
    """Return a profile of three bins, one of them often empty."""
    count = [rng.randint(0, 2), rng.randint(1, 9), 4]
    values = [[rng.random() if n else None for n in count] for _ in range(3)]
    return {"edges": [0, 1, 2, 4], "count": count} | dict(
        zip(("abs_diff_mean", "abs_diff_max", "k3_mean"), values, strict=True)
    )


def logged(rng: random.Random, step: int) -> dict[str, float]:
    """Return what a step logs: some of it now and then, some not finite, some without a weight."""
    metrics = {
        "reward": rng.random(),
        "loss": rng.gauss(0, 1),
        "learning_rate": rng.random(),
        "mismatch/logp_abs_diff_mean": rng.random() * 0.1,
        "mismatch/logp_abs_diff_max": rng.random(),
        "mismatch/k3_kl": rng.random() * 1e-3,
        "mismatch/ess_seq": rng.random(),
        "mismatch/seq_kl": rng.random(),
        "mismatch/loss_scale": rng.choice([1024.0, 2048.0]),
        "mismatch/routing/layer_3_set_mismatch": rng.random(),
        "mismatch/weight_sync_gap": rng.random(),
    }
    if rng.random() < 0.95:
        metrics["mismatch/tokens"] = float(rng.randint(1, 100))
        metrics["mismatch/sequences"] = float(rng.randint(1, 9))
    if rng.random() < 0.1:
        metrics[rng.choice(sorted(metrics))] = rng.choice([math.nan, math.inf])
    if rng.random() < 0.1:
        metrics["mismatch/f_1.1"] = rng.random()
    return metrics


def write(run_dir: Path, seed: int, steps: int = 160) -> Path:
    """Write a run in segments, some of which resume from before what the one before them had written."""
    rng = random.Random(seed)
    step, resumed = 0, None
    while step < steps:
        out = RunStream.open(run_dir, header=header("fp16"), resume_step=resumed)
        step = resumed or 0
        for _ in range(rng.choice([30, 70, 200])):
            step += 1
            out.step(step, logged(rng, step))
            if rng.random() < 0.3:
                out.step(step, {"late": rng.random()})  # of one step, in two lines
            out.event(step, "info", "weight_sync", f"verified at {step}")
            if rng.random() < 0.1:
                out.event(step, "warning", "alarm", f"alarm at {step}", {"metric": "reward", "status": "raised"})
            if step % 5 == 0:
                out.profile(step, {"position": profile(rng)})
                out.scatter(step, [-rng.random()] * 3, [-rng.random()] * 3)
            if step % 20 == 0:
                out.step(step, logged(rng, step), "eval/long")
            if step >= steps:
                out.end(step, "completed")
                break
        out.close()
        # A later segment need not go as far as the one that it resumes.
        resumed = max(step - rng.randint(0, 12), 1)
    return run_dir


@pytest.mark.usefixtures("few_kept")
@pytest.mark.parametrize("seed", range(12))
def test_what_is_said_of_a_run_does_not_depend_on_how_much_of_it_is_kept(tmp_path: Path, seed: int) -> None:
    path = write(tmp_path / "run", seed)
    whole, bounded = read_run(path), read_long_run(path)
    assert bounded.older["train"].steps > 80 and len(bounded.steps) <= FEW
    assert whole.splits == bounded.splits and whole.last_step == bounded.last_step
    assert whole.problems == bounded.problems and whole.ends == bounded.ends and whole.headers == bounded.headers
    assert [e for e in whole.events if e.level != "info"] == [e for e in bounded.events if e.level != "info"]
    for split in whole.splits:
        assert whole.count(split) == bounded.count(split) and whole.logged(split) == bounded.logged(split)
        for name in whole.logged(split):
            check_curves(whole, bounded, name, split)
        pools = pool_profile(whole, "position", split), pool_profile(bounded, "position", split)
        if pools[0] is None:
            assert pools[1] is None
        else:
            assert pools[1] is not None and pools[1].count == pools[0].count and pools[1].largest == pools[0].largest
            assert pools[1].mean == pytest.approx(pools[0].mean, rel=1e-12)
    check_summaries(whole, bounded)
    assert closing_lines(whole) == closing_lines(bounded)
    rows = [tables.event_rows({"run": run}) for run in (whole, bounded)]
    assert rows[0] == rows[1]


def check_curves(whole: RunData, bounded: RunData, name: str, split: str) -> None:
    """Compare what a reader sees of a metric."""
    assert whole.logs(name, split) == bounded.logs(name, split)
    assert set(whole.falls(name, split)) == set(bounded.falls(name, split)) or name != "mismatch/loss_scale"
    one, other = (dict(zip(*run.series(name, split), strict=True)) for run in (whole, bounded))
    assert other.items() <= one.items() and min(one) == min(other) and max(one) == max(other)
    assert (None in one.values()) == (None in other.values())
    known = [[value for value in found.values() if value is not None] for found in (one, other)]
    assert (min(known[0]), max(known[0])) == (min(known[1]), max(known[1]))


def check_summaries(whole: RunData, bounded: RunData) -> None:
    """Compare the tables of the report."""
    one, other = (summarise({"run": run}) for run in (whole, bounded))
    assert one.columns == other.columns and len(one.rows) == len(other.rows)
    for row, same in zip(one.rows, other.rows, strict=True):
        assert (row.steps, row.nonfinite_steps, row.split) == (same.steps, same.nonfinite_steps, same.split)
        assert (row.reward_first, row.reward_last) == (same.reward_first, same.reward_last)
        assert same.values == {k: None if v is None else pytest.approx(v, rel=1e-12) for k, v in row.values.items()}
    verdicts = [judge("run", run, summary) for run, summary in ((whole, one), (bounded, other))]
    assert verdicts[0].level == verdicts[1].level and verdicts[0].mean == pytest.approx(verdicts[1].mean)


def test_a_run_that_is_kept_whole_is_read_alike(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 3)
    assert read_long_run(path) == read_run(path)


@pytest.mark.usefixtures("few_kept")
def test_a_step_that_comes_too_late_is_named(tmp_path: Path) -> None:
    with RunStream.open(tmp_path, header=header("bf16")) as out:
        for step in [*range(1, 100), 3]:
            out.step(step, {"reward": 1.0})
    (problem,) = read_long_run(tmp_path).problems
    assert re.fullmatch(
        r"line 101 was left out: step 3 of train comes after step \d+ has been added up, 20 lines .*", problem
    )


@pytest.mark.usefixtures("few_kept")
def test_problems_are_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"broken\n" * 100)
    data = read_long_run(tmp_path)
    assert len(data.problems) + data.more_problems == 101 and len(data.problems) == 5  # no header either
    assert any("problems   101, the first: line 1" in line for line in closing_lines(data))


def test_a_stretch_keeps_its_extremes_and_gaps() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    for count in (1, 5, 4097, 70_000):
        values = rng.normal(size=count)
        values[rng.integers(0, count, 3)] = math.nan
        stretches, at = Stretches(), 0
        while at < count:
            size = int(rng.integers(1, 3000))
            stretches.add(np.arange(at, min(at + size, count)), values[at : at + size])
            at += size
        points = dict(stretches.points())
        assert len(stretches.kept) <= STRETCHES and len(points) <= 3 * STRETCHES
        groups = [values[k : k + stretches.width] for k in range(0, count, stretches.width)]
        assert len(groups) == len(stretches.kept)
        for k, group in enumerate(groups):
            inside = [points[s] for s in range(k * stretches.width, k * stretches.width + len(group)) if s in points]
            known = [value for value in inside if value is not None]
            if not np.isnan(group).all():
                assert (min(known), max(known)) == (np.nanmin(group), np.nanmax(group))
            assert (None in inside) == bool(np.isnan(group).any())


def test_a_curve_that_is_drawn_in_stretches_keeps_its_peaks() -> None:
    steps = list(range(1, 50_001))
    values: list[float | None] = [math.sin(step / 700) for step in steps]
    values[12_345], values[30_000], values[40_000] = 9.0, -9.0, None
    shown, drawn = thinned(steps, values)
    assert len(shown) <= 1.5 * MAX_POINTS and shown == sorted(set(shown))
    assert (shown[0], shown[-1]) == (1, 50_000)
    found = dict(zip(shown, drawn, strict=True))
    assert (found[12_346], found[30_001], found[40_001]) == (9.0, -9.0, None)
    assert all(values[step - 1] == value for step, value in found.items())
    assert thinned(steps[:MAX_POINTS], values[:MAX_POINTS]) == (steps[:MAX_POINTS], values[:MAX_POINTS])


LONG = """
import json, random, sys
from pathlib import Path
from mismatch_ext.report import build
from mismatch_ext.stream import RunStream
from tests.memory import peak
from tests.unit.synthetic_runs import header

run, lines, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)
with RunStream.open(run, header=header("bf16")) as stream:
    stream.event(7, "warning", "alarm", "an early alarm", {"metric": "reward", "status": "raised"})
with (run / "metrics.jsonl").open("a") as file:
    for step in range(1, lines + 1):
        x = rng.random()
        gap = 5.5 if step == lines // 3 else 0.01 + 1e-3 * x
        file.write('{"kind": "step", "segment": 0, "step": %d, "split": "train", "metrics": {"reward": %f, "loss": %f, '
                   '"mismatch/tokens": 9, "mismatch/logp_abs_diff_mean": %f, "mismatch/logp_abs_diff_max": %f, '
                   '"mismatch/k3_kl": %f, "mismatch/ess_seq": %f}}\\n' % (step, x, -x, gap, 8 * gap, 1e-4 * x, 1 - x))
        if step % 2 == 0:
            file.write('{"kind": "event", "segment": 0, "step": %d, "level": "info", "name": "weight_sync", '
                       '"message": "ok"}\\n' % step)
        if step % 50 == 0:
            row = ", ".join("-%.17f" % rng.random() for _ in range(30))
            file.write('{"kind": "scatter", "segment": 0, "step": %d, "split": "train", "rollout_logprobs": [%s], '
                       '"old_logprobs": [%s]}\\n' % (step, row, row))
build(Path(sys.argv[3]))  # imports, and the page's script
before = peak()
with RunStream.open(run, header=header("bf16"), resume_step=lines) as stream:
    segment = stream.segment
resumed = peak() - before
built = build(run)
found = {"grown": peak() - before, "resumed": resumed, "size": built.path.stat().st_size}
print(json.dumps(found | {"steps": built.summary.rows[0].steps, "segment": segment}))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[dict[str, Any], str]]:
    """Report two runs, one five times as long as the other; what it cost, and the page."""
    folder = tmp_path_factory.mktemp("long")
    write(folder / "short", 0, 20)
    found = {}
    for lines in (20_000, 100_000):
        run = folder / str(lines)
        command = [sys.executable, "-c", LONG, str(run), str(lines), str(folder / "short")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        found[lines] = json.loads(done.stdout), (run / "report.html").read_text(encoding="utf-8")
    return found


def test_memory_and_page_do_not_grow_with_the_run(reports: dict[int, tuple[dict[str, Any], str]]) -> None:
    (short, _), (long, _) = reports.values()
    assert (short["steps"], long["steps"], long["segment"]) == (20_000, 100_000, 1)
    # Five times the lines; what is kept of either is the same.
    assert long["grown"] < 1.6 * short["grown"]
    assert long["resumed"] < 0.2 * short["grown"]
    assert long["size"] < 1.1 * short["size"]


def test_a_long_report_says_what_it_leaves_out_and_leaves_out_no_peak(
    reports: dict[int, tuple[dict[str, Any], str]],
) -> None:
    for lines, (_, page) in reports.items():
        assert f"curves of train show 1000 stretches of its {lines} steps" in page
        assert f"{lines // 2} times; the last: ok" in page  # the events, in one row
        assert "an early alarm" in page
        assert re.search(r'"y": ?\[[^]]*[, ]5\.5[,\]]', page)


def test_a_short_report_says_nothing_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 0, 60)
    page = build(path).path.read_text(encoding="utf-8")
    assert "stretches of its" not in page and "spread evenly over the steps" not in page
    run = load_runs(path)
    (reward,) = [f for s in sections(run) for f in s.figures if f.id == "reward"]
    steps, values = read_run(path).series(Role.REWARD)
    trace = json.loads(reward.json)["data"][0]
    assert (trace["x"], trace["y"]) == (steps, values)


def test_resuming_parses_a_line_per_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        with RunStream.open(tmp_path, header=header("bf16"), resume_step=number * 500 if number else None) as out:
            for step in range(500):
                out.step(number * 500 + step, {"reward": 1.0})
    parsed: list[bytes] = []
    monkeypatch.setattr(stream, "parse_line", lambda line: parsed.append(line) or parse_line(line))
    with RunStream.open(tmp_path, header=header("bf16"), resume_step=1500) as out:
        assert out.segment == 3
    assert len(parsed) == 3
