"""Alarms: when an alarm is raised and over, what a user may change of it, what a resumed run does, what is said."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_ext.alarms import DEFAULTS, AlarmState, resumed
from mismatch_ext.closing import closing_lines
from mismatch_ext.config import MismatchConfig, MonitorConfig
from mismatch_ext.errors import RecordError
from mismatch_ext.log_reading import read_run
from mismatch_ext.metrics_file import SegmentFile
from mismatch_ext.names import MEANING, PREFIX
from mismatch_ext.states import to_json
from tests.unit import synthetic_runs
from tests.unit.tables import table
from tests.watching import Watching

NAN, INF = math.nan, math.inf


def section(default_alarms: bool = False, **alarms: dict[str, Any]) -> MonitorConfig:
    block = MismatchConfig.parse({"monitor": {"alarms": alarms, "default_alarms": default_alarms}})
    assert block is not None
    return block.monitor


def lines_of(monitor: MonitorConfig) -> list[str]:
    return [rule.describe() for rule in Watching(monitor).rules.values()]


def resume(monitor: Watching, state: AlarmState) -> list[str]:
    """Continue from a state as a checkpoint holds it; return the metrics that begin anew."""
    monitor.state, notes = resumed(json.loads(json.dumps(to_json(state))), monitor.rules)
    return [metric for _, metrics in notes for metric in metrics]


def changes(monitor: Watching, values: list[Any], metric: str = "x") -> list[tuple[int, str]]:
    """Return step and status of each alarm; one log per step, from 1, None a log without the metric."""
    logs = [{"other": 1.0} if value is None else {metric: value} for value in values]
    return [(a.step, a.status) for step, log in enumerate(logs, 1) for a in monitor.observe(step, log)]


@pytest.mark.parametrize(*table("alarm_rules"))
def test_an_alarm_is_raised_and_over_after_its_patience(
    rule: dict[str, Any], values: list[Any], expected: list[list[Any]]
) -> None:
    assert [list(change) for change in changes(Watching(section(x=rule)), values)] == expected


def test_what_an_alarm_says() -> None:
    monitor = Watching(section(default_alarms=True))
    alarms = [a for step in (10, 20, 30) for a in monitor.observe(step, {"mismatch/k3_kl": 0.0042})]
    (raised,) = alarms
    assert (raised.metric, raised.status, raised.side) == ("mismatch/k3_kl", "raised", "above")
    assert (raised.step, raised.first_step, raised.value, raised.threshold) == (30, 10, 0.0042, 0.001)
    assert "mismatch/k3_kl is 0.0042 at step 30" in raised.message and "healthy" in raised.message
    assert monitor.state.raised == ["mismatch/k3_kl"]
    (over,) = [a for step in (40, 50, 60) for a in monitor.observe(step, {"mismatch/k3_kl": 0.0008})]
    assert (over.status, over.step, over.first_step, over.threshold) == ("cleared", 60, 10, 0.001)
    assert monitor.state.raised == []


# Names.


@pytest.mark.parametrize(
    ("name", "log", "metric"),
    [
        ("f_2", {"mismatch/f_2": 2.0}, "mismatch/f_2"),
        ("kl", {"kl": 2.0, "mismatch/kl": 9.0}, "kl"),
        ("f_2", {"eval_mismatch/f_2": 2.0, "eval_f_2": 2.0}, None),
    ],
)
def test_the_prefix_may_be_left_out(name: str, log: dict[str, float], metric: str | None) -> None:
    monitor = Watching(section(**{name: {"above": 1, "patience": 1}}))
    assert [(a.metric, a.value) for a in monitor.observe(1, log)] == ([] if metric is None else [(metric, 2.0)])


def test_trl_s_own_gap_is_watched_where_ours_is_not_logged() -> None:
    stock = {"sampling/sampling_logp_difference/mean": 0.2}
    monitor = Watching(MonitorConfig())
    assert [a.metric for step in range(3) for a in monitor.observe(step, stock)] == list(stock)
    both = stock | {"mismatch/logp_abs_diff_mean": 0.2}
    monitor = Watching(MonitorConfig())
    assert [a.metric for step in range(3) for a in monitor.observe(step, both)] == ["mismatch/logp_abs_diff_mean"]


# The built-in rules and what a block changes of them.


def test_healthy_logs_raise_nothing_and_broken_ones_do() -> None:
    healthy = {
        "mismatch/k3_kl": 9e-4,
        "mismatch/logp_abs_diff_mean": 0.018,
        "mismatch/log_ppl_abs_diff": 0.01,
        "mismatch/ess_token": 0.99,
        "mismatch/overflow_streak": 2.0,
        "grad_norm": 1e6,
        "loss": -0.1,
    }
    monitor = Watching(MonitorConfig())
    assert [alarm for step in range(9) for alarm in monitor.observe(step, healthy)] == []
    assert [a.metric for a in monitor.observe(9, healthy | {"loss": NAN, "grad_norm": INF})] == ["loss"]
    assert [a.metric for a in monitor.observe(12, {"mismatch/overflow_streak": 5.0})] == ["mismatch/overflow_streak"]


def test_each_built_in_rule_of_ours_watches_a_metric_that_is_logged() -> None:
    watched = {name.removeprefix(PREFIX) for name in DEFAULTS if name.startswith(PREFIX)}
    assert watched <= set(MEANING)


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("k3_kl", {"action": "stop"}, "k3_kl > 0.001 (3 logs in a row): stop"),
        ("ess_token", {"above": 2}, "ess_token > 2 or < 0.3 (3 logs in a row): warn"),
        ("loss", {"action": "stop"}, "loss not finite (1 log): stop"),
    ],
)
def test_only_the_given_keys_of_a_built_in_rule_change(name: str, given: dict[str, Any], text: str) -> None:
    assert lines_of(section(**{name: given})) == [text]
    lines = lines_of(section(default_alarms=True, **{name: given}))
    assert text in lines and len(lines) == len(DEFAULTS)


def test_off_switches_a_built_in_rule_off_and_default_alarms_all() -> None:
    on = Watching(section(default_alarms=True, k3_kl={"action": "off"})).rules
    assert set(on) == set(DEFAULTS) - {"mismatch/k3_kl"}
    assert Watching(MonitorConfig(default_alarms=False)).rules == {}


# Resuming.

TRACES = st.lists(
    st.fixed_dictionaries(
        {}, optional={n: st.sampled_from([0.0, 0.85, 0.9, 1.1, 2.0, NAN]) for n in ("mismatch/a", "b", "grad_norm")}
    ),
    max_size=40,
)
RULES = {
    "a": {"above": 1, "patience": 2},
    "b": {"above": 1.5, "below": 0.87, "patience": 1},
    "grad_norm": {"patience": 2},
}


@settings(max_examples=50)
@given(TRACES, st.data())
def test_resuming_anywhere_gives_the_same_alarms(trace: list[dict[str, float]], data: st.DataObject) -> None:
    def texts(monitor: Watching, start: int, logs: list[dict[str, float]]) -> list[str]:
        return [str(alarm) for step, log in enumerate(logs, start) for alarm in monitor.observe(step, log)]

    cut = data.draw(st.integers(0, len(trace)))
    whole, first, second = (Watching(section(**RULES)) for _ in range(3))
    expected = texts(whole, 0, trace)
    before = texts(first, 0, trace[:cut])
    assert resume(second, first.state) == []
    assert before + texts(second, cut, trace[cut:]) == expected
    assert second.state == whole.state


def test_a_metric_whose_rule_changed_begins_anew_and_others_do_not() -> None:
    before = Watching(section(x={"above": 1}, y={"above": 1}, gone={"above": 1}))
    for step in range(3):
        before.observe(step, {"x": 2, "y": 2, "gone": 2})
    after = Watching(section(x={"above": 1, "action": "stop"}, y={"above": 1}, new={"above": 1}))
    assert resume(after, before.state) == ["x"]
    assert after.state.raised == ["y"]
    again = [a for step in (3, 4, 5) for a in after.observe(step, {"x": 2, "y": 2, "new": 2})]
    assert [(a.metric, a.status, a.stops) for a in again] == [("x", "raised", True), ("new", "raised", False)]


def test_an_alarm_that_stopped_begins_anew() -> None:
    before, after = (Watching(section(x={"above": 1, "patience": 1, "action": "stop"})) for _ in range(2))
    assert changes(before, [2]) == [(1, "raised")]
    assert resume(after, before.state) == ["x"]
    assert changes(after, [2]) == [(1, "raised")]


@pytest.mark.parametrize(("change", "named"), [({"beyond": "two"}, "monitor.watches.x.beyond"), ({"odd": 1}, "odd")])
def test_a_damaged_state_is_refused(change: dict[str, Any], named: str) -> None:
    monitor = Watching(section(x={"above": 1}))
    changes(monitor, [2, 2])
    state = to_json(monitor.state)
    state["watches"]["x"] |= change
    with pytest.raises(RecordError, match=named):
        resumed(state, monitor.rules)


# The summary at the end.


def write_two_segments(run_dir: Path) -> Path:
    """Write a run killed after step 6, resumed from step 4, whose gap and alarms are known."""
    alarms = {"k3-kl": {"above": 1}, "k3_kl": {}, "reward": {"below": 0}, "odd": {"above": 1, "action": "off"}}
    config = {"monitor": {"alarms": alarms}}
    header = synthetic_runs.header("bf16", config=config)
    monitor = Watching(MonitorConfig())

    def log(stream: SegmentFile, step: int, k3: float) -> None:
        metrics = {
            "mismatch/k3_kl": k3,
            "mismatch/logp_abs_diff_mean": 0.01,
            "reward": 0.5,
            "mismatch/lr_multiplier": 1.0 if step < 7 else 0.5,
            "mismatch/loss_scale": 1024.0,
            "mismatch/overflow_steps": 2.0,
            "mismatch/weight_sync_gap": 1e-4 * step,
            "mismatch/routing/set_mismatch_frac": 0.02 if step == 3 else 0.01,
        }
        if step >= 7:
            metrics["mismatch/lr_surge_step"] = 5.0
        stream.step(step, metrics)
        for alarm in monitor.observe(step, metrics):
            stream.event(step, alarm.level, "alarm", alarm.message, dataclasses.asdict(alarm))

    stream = SegmentFile.create(run_dir, header=header)
    for step, k3 in enumerate([2e-4, 2e-3, 2e-3, 2e-3], 1):
        log(stream, step, k3)
    saved = monitor.state
    for step in (5, 6):
        log(stream, step, 0.5)
    stream.close()

    monitor = Watching(MonitorConfig())
    monitor.state = saved
    stream = SegmentFile.create(run_dir, header=header, resume_step=4)
    for step, k3 in enumerate([4e-4, 4e-4, 4e-4, 9e-3, 9e-3, 9e-3, 3e-3], 5):
        log(stream, step, k3)
    stream.event(11, "error", "weight_sync", "the engine holds stale weights")
    stream.end(11, "completed")
    stream.close()
    return run_dir


def test_closing_lines_cover_all_segments(tmp_path: Path) -> None:
    run_dir = write_two_segments(tmp_path / "my run")
    assert closing_lines(read_run(run_dir)) == [
        "mismatch-ext: training completed after 11 steps, resumed from step 4",
        "  gap        k3 2.00e-4 -> 0.003 nats per token, worst 0.009 at step 8",
        "             mean |Δlogp| 0.01 -> 0.01 nats per token, worst 0.01 at step 1",
        "  alarms     mismatch/k3_kl: raised 2 times, first at step 4, last at step 10, still raised",
        "  lr         multiplier 0.5 at the end, surge at step 5",
        "  loss scale 1024 at the end, 2 steps skipped",
        "  sync       gap of the probes at most 0.0011, 1 failed, at step 11",
        "  routing    other experts in 1.00% of (token, layer) pairs at the end, at most 2.00%",
        f"  metrics    {run_dir / 'metrics-*.jsonl'}",
        f"  report     mismatch-ext report '{run_dir}'",
    ]


def test_the_closing_line_of_the_kl(tmp_path: Path) -> None:
    stream = SegmentFile.create(tmp_path, header=synthetic_runs.header("bf16", config={"kl": {"target_kl": 0.02}}))
    for step, (k1, coef) in enumerate([(1e-4, 0.05), (0.012, 0.04)]):
        stream.step(step, {"mismatch/kl_ref_k1": k1, "mismatch/kl_coef": coef})
    stream.end(1, "completed")
    stream.close()
    said = "1.00e-4 -> 0.012 nats per token from the reference (k1), target 0.02, coefficient 0.05 -> 0.04"
    assert f"  kl         {said}" in closing_lines(read_run(tmp_path))


def test_the_closing_line_of_replay_is_over_the_logs_that_were_scored_without_it(tmp_path: Path) -> None:
    stream = SegmentFile.create(tmp_path, header=synthetic_runs.header("bf16", config={"routing": {"mode": "R3"}}))
    logs = [
        (0.008, 0.002, 100.0),
        (None, 0.5, None),
        (0.004, 0.001, 300.0),
    ]  # without replay, with it, tokens without it
    for step, (native, k3, tokens) in enumerate(logs):
        measured = {} if native is None else {"mismatch/native/k3_kl": native, "mismatch/native/tokens": tokens}
        stream.step(step, {"mismatch/k3_kl": k3, "mismatch/tokens": 400.0, **measured})
    stream.end(2, "completed")
    stream.close()
    assert "  replay     k3 0.005 without, 0.00125 with" in closing_lines(read_run(tmp_path))


def test_closing_lines_of_a_run_that_was_killed(tmp_path: Path) -> None:
    synthetic_runs.write_run(tmp_path / "fp16", "fp16", steps=5, finish=False)
    path = tmp_path / "fp16" / "metrics-000.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    lines = closing_lines(read_run(tmp_path / "fp16"))
    assert lines[0] == "mismatch-ext: training did not end after 5 steps"
    assert any(line.startswith("  problems   1, the first: metrics-000.jsonl, line ") for line in lines)
    (tmp_path / "metrics-000.jsonl").write_text("")
    assert closing_lines(read_run(tmp_path))[0] == "mismatch-ext: training did not end after 0 steps"
