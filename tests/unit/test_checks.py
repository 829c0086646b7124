"""What a failed check does: an error if the config acts, otherwise counted and warned of; and what makes a config act."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext.checks import ALL_WRITTEN, Checks, FailedCheck
from mismatch_ext.closing import closing_lines
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import (
    ConfigError,
    OtherRankError,
    RecordError,
    RunDirectoryError,
    WeightSyncError,
    asking_engine,
)
from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build
from tests.unit.loops import Two
from tests.unit.synthetic_runs import run_stream

STALE = WeightSyncError("the weights are stale")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_config_that_acts_raises_what_the_check_raises() -> None:
    checks = Checks(True)
    with pytest.raises(WeightSyncError) as raised, checks.checking("weight_sync"):
        raise STALE
    assert raised.value is STALE
    with pytest.raises(ZeroDivisionError), checks.checking("ours"):
        _ = 1 / 0
    assert not checks.counts and not checks.metrics() and not checks.unwritten


def test_otherwise_it_is_counted_and_warned_of_once() -> None:
    checks = Checks(False, lambda: 7)
    with pytest.warns(
        UserWarning, match="the check 'weight_sync' failed at step 7; the run goes on. WeightSyncError"
    ) as told:
        for _ in range(3):
            with checks.checking("weight_sync"):
                raise STALE
    assert len(told) == 1 and checks.metrics() == {"checks_failed/weight_sync": 3.0}
    assert [failed.check for failed in checks.unwritten] == ["weight_sync"] * 3


@pytest.mark.parametrize("bug", [TypeError, OtherRankError])
def test_a_config_that_only_measures_ends_nothing_also_if_this_package_is_at_fault(bug: type[Exception]) -> None:
    checks = Checks(False)
    with pytest.warns(UserWarning, match=bug.__name__), checks.checking("any"):
        raise bug("a bug")
    assert checks.counts["any"] == 1
    with pytest.raises(bug), Checks(True).checking("any"):
        raise bug("a bug")
    with pytest.raises(KeyboardInterrupt), checks.checking("any"):
        raise KeyboardInterrupt


def test_what_an_engine_raises_is_an_error_of_the_engine() -> None:
    checks = Checks(False)
    with checks.checking("weight_sync"), asking_engine("score probe tokens"):
        raise ValueError("no room in its cache")
    (failed,) = checks.unwritten
    assert failed.message == "EngineError: the engine failed to score probe tokens: ValueError: no room in its cache"
    with pytest.raises(RecordError), asking_engine("sample"):
        raise RecordError("ours already")


def test_around_the_hosts_code_its_errors_are_its_own() -> None:
    checks, left = Checks(False), []

    @contextlib.contextmanager
    def ours(fails: str = "") -> Iterator[str]:
        if fails == "entering":
            raise ConfigError(fails)
        try:
            yield "entered"
        finally:
            left.append(True)
            if fails == "leaving":
                raise ConfigError(fails)

    with checks.around("entering", ours("entering")) as value:
        assert value is None
    with checks.around("leaving", ours("leaving")) as value:
        assert value == "entered"
    with pytest.raises(ZeroDivisionError), checks.around("host", ours()):
        _ = 1 / 0
    assert checks.counts == {"entering": 1, "leaving": 1} and len(left) == 2


def test_failures_before_a_file_are_written_into_it_and_one_that_fails_ends_nothing() -> None:
    checks, lines = Checks(False), list[Any]()
    checks.note("early", "before")

    def sink(*event: Any) -> None:
        if event[4]["check"] == "disk":
            raise RunDirectoryError("full")
        lines.append(event)

    checks.report_to(sink)
    checks.note("disk", "lost")
    checks.note("late", "after")
    assert [event[4]["check"] for event in lines] == ["early", "late"]


def test_a_check_that_always_fails_does_not_fill_the_file() -> None:
    checks, lines = Checks(False), list[Any]()
    checks.report_to(lambda *event: lines.append(event))
    for _ in range(1000):
        checks.note("weight_sync", "stale")
    counts = [event[4]["count"] for event in lines]
    assert counts == [*range(1, ALL_WRITTEN + 1), 16, 32, 64, 128, 256, 512]
    assert checks.metrics() == {"checks_failed/weight_sync": 1000.0}


def run_of(folder: Path, acts: bool, checks: Checks | None) -> Path:
    with run_stream(folder, header={"run": {"name": "r"}, "config": {"monitor": {}}, "acts": acts}) as stream:
        stream.step(1, {"mismatch/logp_abs_diff_mean": 0.01})
        if checks is not None:
            checks.report_to(stream.event)
        stream.end(1, "completed")
    return folder


def test_a_check_that_all_ranks_ran_together_has_failed_once() -> None:
    together = FailedCheck(check="weight_sync", step=3, message="stale")
    of_two = [FailedCheck(check="measure", step=3, message=f"batch {number}") for number in range(2)]
    checks = Checks(False, lambda: 3)
    checks.add([together], warned=True)
    checks.gather(Two(said=[together, *of_two], sums=3.0))
    assert checks.counts == {"weight_sync": 1, "measure": 2}
    checks.gather(Two(said=[dataclasses.replace(together, step=4)], sums=1.0))
    silent = Two()
    checks.gather(silent)
    assert [type(asked) for asked in silent.asked] == [torch.Tensor]
    assert checks.counts["weight_sync"] == 2


def test_closing_lines_and_report_name_the_failed_checks(tmp_path: Path) -> None:
    checks = Checks(False)
    checks.note("later", "<b>of step 3</b>", step=3)
    for _ in range(20):
        checks.note("first", "of step 2", step=2)
    found = run_of(tmp_path / "found", False, checks)
    nothing = run_of(tmp_path / "nothing", False, None)
    lines = "\n".join(closing_lines(read_run(found)))
    assert "first: failed 16 times, first at step 2" in lines
    assert lines.index("first: failed") < lines.index("later: failed once, first at step 3")
    assert "checks     none failed" in "\n".join(closing_lines(read_run(nothing)))
    page = build(found).path.read_text(encoding="utf-8").partition("<script>")[0]
    assert "<td>first</td>" in page and "&lt;b&gt;of step 3" in page


SECTIONS: dict[str, Any] = {
    "precision": {"dtype": "float16"},
    "correction": {"preset": "tis"},
    "kl": {"coef": 0.1},
    "routing": {"mode": "R3"},
    "sampling_mask": {},
    "lr": {},
}


def parsed(block: Any) -> MismatchConfig:
    config = MismatchConfig.parse(block)
    assert config is not None
    return config


@pytest.mark.parametrize(
    "acting",
    [
        *({name: keys} for name, keys in SECTIONS.items()),
        {"monitor": {"alarms": {"k3_kl": {"action": "stop"}}}},
        {"monitor": {"weight_sync": "error"}},
    ],
)
def test_what_makes_a_config_act_is_left_out_by_level_observe(acting: dict[str, Any]) -> None:
    assert parsed(acting).acts and parsed({"level": "enforce", **acting}) == parsed(acting)
    measured = parsed({"level": "observe", **acting})
    assert not measured.acts and not parsed(measured.to_dict()).acts
    assert measured.features == MismatchConfig().features
    assert "level" not in measured.to_dict()


def test_a_section_is_checked_before_level_observe_leaves_it_out() -> None:
    with pytest.raises(ConfigError, match=r"mismatch.lr: unknown key 'perod'"):
        MismatchConfig.parse({"level": "observe", "lr": {"perod": 2}})
    with pytest.raises(ConfigError, match="mismatch.level: 'obsevre' is not allowed.*Did you mean 'observe'"):
        MismatchConfig.parse({"level": "obsevre"})
