"""Bad rows are counted by reason, and too many of them end a run whose config acts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext import MismatchConfig
from mismatch_ext.bad_rows import BadRows, BadRowWindow
from mismatch_ext.checks import Checks
from mismatch_ext.closing import closing_lines
from mismatch_ext.log import Logged, RunLog
from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build
from mismatch_ext.rollout import record_of
from mismatch_ext.routing import RoutingTrace
from tests.unit.test_rollout import ORIGIN


def test_values_at_masked_places_are_no_fault() -> None:
    values = torch.tensor([[-1.0, math.nan], [math.inf, -1.0], [-1.0, -1.0]])
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    bad = BadRows(3)
    bad.add_non_finite("rollout_logprobs", values, mask)

    assert bad.flags().tolist() == [False, True, False]
    assert "row 1, token 0: the engine's log-probability is inf" in bad.faults[1].message


@pytest.mark.parametrize(
    ("share", "bad", "rows", "ends"),
    [
        (0.01, 2, 32, False),
        (0.01, 3, 32, True),
        (0.01, 3, 300, False),
        (0, 1, 1000, True),
        (1, 9, 9, False),
    ],
)
def test_a_share_of_bad_rows_ends_a_run_if_there_are_three(share: float, bad: int, rows: int, ends: bool) -> None:
    assert (BadRowWindow().after(1, bad, rows).too_many(share) is not None) == ends


def test_steps_before_the_window_are_forgotten() -> None:
    window = BadRowWindow().after(1, 5, 32)
    for step in range(2, 21):
        window = window.after(step, 0, 8)
    assert window.too_many(0.01) is not None
    assert window.after(21, 0, 8).too_many(0.01) is None


@pytest.mark.parametrize("acts", [True, False])
def test_too_many_bad_rows_stop_a_run_that_acts(tmp_path: Path, acts: bool) -> None:
    told: list[str] = []
    block = MismatchConfig()
    log = RunLog(block, tmp_path, info=lambda: {}, step=lambda: 0, checks=Checks(acts), tell=told.append)
    log.begin()
    for step in (1, 2, 3):
        bad = BadRows(32)
        bad.add(5, "routes", f"rollout {step} has no routes.")
        log.count_bad_rows("train", bad)
        logged = log.log(step, {"loss": 0.0})
        assert logged.metrics["mismatch/bad_rows/routes"] == 1
        assert (logged.stop is not None) == (acts and step == 3)
    assert log.log(4, {"loss": 0.0}).stop is None  # a run that goes on counts anew

    lines = [json.loads(line) for line in (tmp_path / "metrics-000.jsonl").read_text().splitlines()]
    events = [line for line in lines if line["kind"] == "event" and line["name"] == "bad_rows"]
    assert [event["level"] for event in events] == ["warning"] * 3 + ["error"] * acts
    assert sum("rollout 1 has no routes" in message for message in told) == 1


def test_closing_lines_and_report_list_bad_rows_by_reason(tmp_path: Path) -> None:
    log = RunLog(MismatchConfig(), tmp_path, info=lambda: {"acts": True}, step=lambda: 2, checks=Checks(True))
    log.begin()
    for step, reason in ((1, "routes"), (2, "tokens")):
        bad = BadRows(8)
        for row in range(2):
            bad.add(row, reason, f"row {row}: <b>{reason}</b> are wrong.")
        log.count_bad_rows("train", bad)
        log.log(step, {"loss": 0.0})
    log.end("completed")

    lines = "\n".join(closing_lines(read_run(tmp_path)))
    assert "routes: 2 rows, first at step 1" in lines
    assert "tokens: 2 rows, first at step 2" in lines
    assert "ended the run at step 2" in lines
    page = build(tmp_path).path.read_text(encoding="utf-8").partition("<script>")[0]
    assert "&lt;b&gt;routes" in page
    assert "was ended by them at step 2" in page


def test_what_no_log_has_taken_yet_is_written_at_the_end(tmp_path: Path) -> None:
    log = RunLog(MismatchConfig(), tmp_path, info=lambda: {}, step=lambda: 1, checks=Checks(True))
    log.begin()
    bad = BadRows(8)
    bad.add(5, "mask", "no mask.")
    log.count_bad_rows("train", bad)
    log.end("failed", "in the step")
    (step,) = read_run(tmp_path).steps
    assert step.metrics["mismatch/bad_rows/mask"] == 1


def test_a_checkpoint_has_the_window_and_the_reasons(tmp_path: Path) -> None:
    told: list[str] = []

    def new(folder: str) -> RunLog:
        log = RunLog(
            MismatchConfig(), tmp_path / folder, info=dict, step=lambda: 0, checks=Checks(True), tell=told.append
        )
        log.begin()
        return log

    def count(log: RunLog, step: int, rows: int) -> Logged:
        bad = BadRows(32)
        for row in range(rows):
            bad.add(row, "mask", "no mask.")
        log.count_bad_rows("train", bad)
        return log.log(step, {"loss": 0.0})

    first, second = new("first"), new("second")
    assert count(first, 1, rows=2).stop is None
    second.load_state_dict(first.state_dict(), step=1)
    # The series goes on, and what was said once is not said again.
    assert count(second, 2, rows=0).metrics["mismatch/bad_rows/mask"] == 0.0
    assert count(second, 3, rows=1).stop is not None
    assert len([message for message in told if "(mask)" in message]) == 1
    # A training that does not resume begins without them.
    second.begin_anew()
    assert "mismatch/bad_rows/mask" not in count(second, 1, rows=0).metrics


TOO_SHORT = RoutingTrace(parts=(torch.zeros(2, 1, 1, dtype=torch.uint8),), layers=(0,), num_experts=4)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("rollout_logprobs", (-1.0, math.nan), "rollout_logprobs"), ("routing", TOO_SHORT, "routes")],
)
def test_a_record_without_what_does_not_fit_has_a_fault(field: str, value: object, reason: str) -> None:
    fields: dict[str, Any] = {
        "prompt_ids": (1, 2),
        "response_ids": (3, 4),
        "rollout_logprobs": (-1.0, -2.0),
        "response_mask": (True, True),
        "finish_reason": None,
        "provenance": ORIGIN,
    }
    assert record_of(**fields).fault is None
    record = record_of(**fields | {field: value})

    assert record.fault is not None
    assert record.fault.reason == reason
    assert record.routing is None
    assert all(map(math.isfinite, record.rollout_logprobs))
