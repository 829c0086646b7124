"""What becomes of failed checks: errors under `enforce`, findings under `observe`."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.checkpoint import changed_settings
from mismatch_ext.checks import ALL_WRITTEN, Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, RunDirectoryError, WeightSyncError
from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build, closing_lines
from tests.unit.synthetic_runs import run_stream

STALE = WeightSyncError("the weights are stale")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_enforce_raises_what_the_check_raises() -> None:
    checks = Checks(True)
    with pytest.raises(WeightSyncError) as raised, checks.checking("weight_sync"):
        raise STALE
    assert raised.value is STALE
    with pytest.raises(ZeroDivisionError), checks.checking("ours"):
        _ = 1 / 0
    assert not checks.counts and not checks.metrics() and not checks.unwritten


def test_observe_finds_it_counts_it_and_warns_once() -> None:
    checks = Checks(False, lambda: 7)
    with pytest.warns(UserWarning, match="weight_sync failed at step 7: WeightSyncError") as told:
        for _ in range(3):
            with checks.checking("weight_sync"):
                raise STALE
    assert len(told) == 1 and checks.metrics() == {"observed/weight_sync": 3.0}
    with checks.checking("ours"):
        _ = 1 / 0
    assert [finding.check for finding in checks.unwritten] == ["weight_sync"] * 3 + ["ours"]
    assert "ours failed at step 7: ZeroDivisionError" in checks.unwritten[-1].sentence()


def test_what_ends_a_process_is_no_finding() -> None:
    with pytest.raises(KeyboardInterrupt), Checks(False).checking("any"):
        raise KeyboardInterrupt


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
    with pytest.raises(ZeroDivisionError), checks.around("both", ours("leaving")):
        _ = 1 / 0
    assert checks.counts == {"entering": 1, "leaving": 1, "both": 1} and len(left) == 3
    with pytest.raises(ConfigError), Checks(True).around("entering", ours("entering")):
        pass


def test_findings_before_a_file_are_written_into_it_and_one_that_fails_ends_nothing() -> None:
    checks, lines = Checks(False), list[Any]()
    checks.note("early", "before")
    assert pickle.loads(pickle.dumps(checks)).unwritten == checks.unwritten  # as in a saved configuration

    def sink(*event: Any) -> None:
        if event[4]["check"] == "disk":
            raise RunDirectoryError("full")
        lines.append(event)

    checks.report_to(sink)
    checks.note("disk", "lost")
    checks.note("late", "after")
    assert [event[4]["check"] for event in lines] == ["early", "late"]
    assert {event[2] for event in lines} == {"observed"} and {event[1] for event in lines} == {"warning"}


def test_a_check_that_always_fails_does_not_fill_the_file() -> None:
    checks, lines = Checks(False), list[Any]()
    checks.report_to(lambda *event: lines.append(event))
    for _ in range(1000):
        checks.note("weight_sync", "stale")
    counts = [event[4]["count"] for event in lines]
    assert counts == [*range(1, ALL_WRITTEN + 1), 16, 32, 64, 128, 256, 512]
    assert checks.metrics() == {"observed/weight_sync": 1000.0}


def observed_run(folder: Path, level: str | None, checks: Checks | None) -> Path:
    config: dict[str, Any] = {"monitor": {}} | ({} if level is None else {"level": level})
    with run_stream(folder, header={"run": {"name": "r"}, "config": config}) as stream:
        stream.step(1, {"mismatch/logp_abs_diff_mean": 0.01})
        if checks is not None:
            checks.report_to(stream.event)
        stream.end(1, "completed")
    return folder


def test_closing_lines_and_report_name_the_failed_checks(tmp_path: Path) -> None:
    checks = Checks(False)
    checks.note("later", "<b>of step 3</b>", step=3)
    for _ in range(20):
        checks.note("first", "of step 2", step=2)
    found = observed_run(tmp_path / "found", "observe", checks)
    nothing = observed_run(tmp_path / "nothing", "observe", None)
    enforced = observed_run(tmp_path / "enforced", None, None)
    lines = "\n".join(closing_lines(read_run(found)))
    assert "first: failed 16 times, first at step 2" in lines
    assert lines.index("first: failed") < lines.index("later: failed once, first at step 3")
    assert "no check failed" in "\n".join(closing_lines(read_run(nothing)))
    assert "check" not in "\n".join(closing_lines(read_run(enforced))[:2])
    pages = [
        build(folder).path.read_text(encoding="utf-8").partition("<script>")[0] for folder in (found, nothing, enforced)
    ]
    assert "<td>first</td>" in pages[0] and "&lt;b&gt;of step 3" in pages[0]
    assert "No check failed." in pages[1] and 'id="observed"' not in pages[2]


def test_the_level_of_a_block() -> None:
    block = MismatchConfig.parse({"level": "observe", "precision": {"dtype": "float16"}, "lr": {}})
    assert block is not None and block.level == "observe"
    assert block.acting == MismatchConfig(level="observe") and MismatchConfig.parse(block.to_dict()) == block
    enforced = MismatchConfig.parse({"lr": {}})
    assert enforced is not None and enforced.acting is enforced and "level" not in enforced.to_dict()
    with pytest.raises(ConfigError, match="mismatch.level: 'obsevre' is not allowed"):
        MismatchConfig.parse({"level": "obsevre"})
    said = changed_settings(block.to_dict(), enforced.to_dict())
    assert said is not None and "mismatch.level was 'observe' and is 'enforce'" in said
