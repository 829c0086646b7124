"""What each host calls its own metrics: on streams that verl and TRL have written, and through the alarms."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from docs.generate import MEANINGS
from mismatch_ext.alarms import unwatched
from mismatch_ext.config import AlarmConfig, MonitorConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.log_reading import read_run
from mismatch_ext.names import HOSTS, TRL, VERL, HostNames, Role, names_of
from mismatch_ext.report import load_runs
from mismatch_ext.report.figures import sections
from tests.watching import Watching

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests/data/verl"


def recorded(name: str, run_dir: Path, **changes: Any) -> Path:
    """Lay a recorded stream into a folder, keys of its header changed, or taken out by None."""
    run_dir.mkdir()
    shutil.copy(RECORDED / f"{name}.jsonl", run_dir / "metrics-000.jsonl")
    first, *lines = (run_dir / "metrics-000.jsonl").read_text(encoding="utf-8").splitlines()
    head = {key: value for key, value in (json.loads(first) | changes).items() if value is not None}
    (run_dir / "metrics-000.jsonl").write_text("\n".join([json.dumps(head), *lines]) + "\n", encoding="utf-8")
    return run_dir


def plots(run_dir: Path) -> dict[str, Any]:
    """Return the traces of every plot of a report, by the plot's id."""
    return {f.id: json.loads(f.json)["data"] for section in sections(load_runs(run_dir)) for f in section.figures}


def steps_of(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step line of a stream, as they were written."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "step"]


def logged(run_dir: Path, name: str) -> list[float]:
    return [metrics[name] for metrics in steps_of(run_dir / "metrics-000.jsonl")]


def test_roles_names_and_meanings_are_of_one_set() -> None:
    assert set(MEANINGS) == set(Role)
    for names in (HostNames(), *HOSTS.values()):
        assert all(names.role(names.of(role)) == role for role in Role)
        assert names.of("mismatch/kl") == names.role("mismatch/kl") == "mismatch/kl"


@pytest.mark.parametrize(
    ("plot", "metric"),
    [
        ("reward", "critic/score/mean"),
        ("length", "response_length/mean"),
        ("loss", "actor/loss"),
        ("grad-norm", "actor/grad_norm"),
    ],
)
def test_the_report_of_a_verl_run_has_its_reward_length_loss_and_norm(plot: str, metric: str, tmp_path: Path) -> None:
    run_dir = recorded("stock_rate", tmp_path / "run")
    (trace,) = plots(run_dir)[plot]
    assert trace["x"] == [1, 2, 3] and trace["y"] == logged(run_dir, metric)


def test_the_rate_that_was_applied_is_read_whether_the_stream_has_it_or_the_next_one(tmp_path: Path) -> None:
    stock = recorded("stock_rate", tmp_path / "stock")
    assert logged(stock, "actor/lr") == [2.5e-4, 5e-4, 7.5e-4]  # four steps of warm-up, from 0
    assert read_run(stock).series(Role.LEARNING_RATE) == ([2, 3], [2.5e-4, 5e-4])
    applied = recorded("stock_rate", tmp_path / "applied", names=VERL.to_dict())
    assert read_run(applied).series(Role.LEARNING_RATE) == ([1, 2, 3], [2.5e-4, 5e-4, 7.5e-4])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"length": "my/length", "loss": 3, "next_rate": "yes", "other": "x"}, HostNames(length="my/length")),
        ("TRL", HostNames()),
        (VERL.to_dict(), VERL),
    ],
)
def test_names_come_from_the_header(names: Any, expected: HostNames) -> None:
    assert names_of({"names": names}) == expected


# Alarms.


def section(**alarms: dict[str, Any]) -> MonitorConfig:
    return MonitorConfig(default_alarms=False, alarms={k: AlarmConfig(**v) for k, v in alarms.items()})


@pytest.mark.parametrize("names", [TRL, VERL, HostNames()])
@pytest.mark.parametrize("role", list(Role))
def test_an_alarm_on_a_role_watches_what_the_host_logs(names: HostNames, role: Role) -> None:
    monitor = Watching(section(**{role: {"above": 1, "patience": 1}}), names)
    log = {names.of(role): 2.0}
    assert unwatched(monitor.rules, log) == {} and list(unwatched(monitor.rules, {"other": 2.0})) == [role]
    assert [alarm.metric for alarm in monitor.observe(1, log)] == [names.of(role)]


def test_built_in_alarms_watch_each_host_s_loss_and_norm() -> None:
    for names in HOSTS.values():
        monitor = Watching(MonitorConfig(), names)
        found = [
            a for step in range(3) for a in monitor.observe(step, {names.loss: math.nan, names.grad_norm: math.inf})
        ]
        assert [alarm.metric for alarm in found] == [names.loss, names.grad_norm]
        assert "the weights are broken" in found[0].message


def test_a_recorded_verl_run_raises_no_built_in_alarm_until_its_loss_is_broken() -> None:
    monitor, steps = Watching(MonitorConfig(), VERL), steps_of(RECORDED / "stock_rate.jsonl")
    assert [alarm for step, metrics in enumerate(steps, 1) for alarm in monitor.observe(step, metrics)] == []
    assert [alarm.metric for alarm in monitor.observe(4, steps[-1] | {"actor/loss": math.nan})] == ["actor/loss"]


def test_a_role_and_the_host_s_name_for_it_are_one_metric() -> None:
    config = section(length={"above": 1}, **{"response_length/mean": {"above": 2}})
    with pytest.raises(ConfigError, match="'length' and 'response_length/mean' name one metric"):
        Watching(config, VERL)
    assert set(Watching(config, TRL).rules) == {"length", "response_length/mean"}


# Advice.
