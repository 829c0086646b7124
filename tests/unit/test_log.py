"""What is written of a run, whatever trains: segments, gap, alarms, what a checkpoint holds of them, and the end."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext.banner import run_info
from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.log import RunLog
from mismatch_ext.log_reading import EventRecord, read_run, segment_files
from mismatch_ext.names import VERL, HostNames
from mismatch_ext.precision.audit import EngineReading, TrainerReading
from mismatch_ext.ranks import ONE_PROCESS, Ranks
from mismatch_ext.routing.agreement import of_layer

STOP = {"above": 1.0, "patience": 1, "action": "stop"}
TRAINER = TrainerReading(
    parameter_dtypes={"float32": 10}, autocast_dtype=None, scaler=None, reduce_dtype=None, device="cpu"
)
ENGINE = EngineReading(
    engine="vllm",
    version="1",
    model_dtype="float32",
    parameter_dtypes={},
    kv_cache_dtype="auto",
    logprobs_mode="raw_logprobs",
    quantization=None,
)


def block_of(sections: Any = None, **alarms: Any) -> MismatchConfig:
    monitor = {"alarms": alarms, "default_alarms": False}
    block = MismatchConfig.parse({"monitor": monitor, **(sections or {})})
    assert block is not None
    return block


class Run:
    """A log in a folder, with what it told the user."""

    def __init__(
        self, folder: Path, *, names: HostNames | None = None, ranks: Ranks = ONE_PROCESS, **block: Any
    ) -> None:
        self.told: list[str] = []
        self.at = 0
        self.block = block_of(**block)
        self.checks = Checks(self.block.acts, lambda: self.at)
        self.log = RunLog(
            self.block,
            folder,
            info=self.info,
            step=lambda: self.at,
            names=names,
            ranks=ranks,
            checks=self.checks,
            tell=self.told.append,
        )

    def info(self) -> dict[str, Any]:
        return run_info(
            self.block,
            HostNames(),
            name="a run",
            host="a loop",
            model="m",
            model_type="t",
            parameters=10,
            device="cpu",
            seed=0,
            trainer=TRAINER,
            engine=ENGINE,
            patches=[{"name": "a/patch", "target": "some.module:Class.method"}],
        )


def events(folder: Path, name: str) -> list[EventRecord]:
    return [event for event in read_run(folder).events if event.name == name]


def logprobs(gap: float) -> dict[str, Tensor]:
    return {
        "old": torch.full((2, 3), -1.0),
        "rollout": torch.full((2, 3), -1.0 - gap),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    }


def test_a_run_is_written_from_header_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.log.event("info", "early", "before the file is open")
    run.log.begin(None)
    run.log.announce()
    run.log.sums.add_gap("train", **logprobs(0.5))
    run.at = 1
    logged = run.log.log(1, {"reward": torch.tensor(0.25), "text": "left out"})
    assert logged.metrics["mismatch/logp_abs_diff_mean"] == 0.5 and logged.stop is None
    run.log.sums.add_gap("train", **logprobs(0.25))
    run.log.end("completed")
    data = read_run(tmp_path)
    assert data.header["run"]["host"] == "a loop" and [e.name for e in data.events] == ["early"]
    assert data.header["patches"] == [{"name": "a/patch", "target": "some.module:Class.method"}]
    assert data.series("reward") == ([1], [0.25])
    # What was measured after the last log is written too.
    assert data.steps[-1].metrics["mismatch/logp_abs_diff_mean"] == 0.25
    assert [(end.step, end.status) for end in data.ends] == [(1, "completed")]
    said = capsys.readouterr().out
    assert "measures, and changes nothing in, a loop" in said and "training completed after 1 step" in said


@pytest.mark.parametrize("asked", [{}, {"alarms": {"seq_kl": {"above": 9}}}, {"metrics": "all"}])
def test_consoles_get_the_short_list_and_the_file_gets_all(tmp_path: Path, asked: dict[str, Any]) -> None:
    block = MismatchConfig.parse({"monitor": asked})
    assert block is not None
    log = RunLog(block, tmp_path, info=Run(tmp_path).info, step=lambda: 1)
    log.begin(None)
    log.sums.add_gap("train", **logprobs(0.5))
    logged = log.log(1, {"reward": 0.25})
    whole = read_run(tmp_path).steps[0].metrics
    assert whole.keys() == {"reward", *logged.metrics} and "mismatch/k3_kl" in log.shown(whole)
    assert ("mismatch/seq_kl" in log.shown(whole)) == bool(asked)


USERS_OWN = (
    "val-core/token_mismatch/acc/mean@8",
    "reward/mismatch/format",
    "eval_reward/mismatch/format",
    "rewards/mismatch/routing/layer_3_set_mismatch",
)
"""Names of users' own metrics that have our prefix in their middle."""


def test_a_users_metric_is_shown_whatever_follows_the_beginning_of_its_name(tmp_path: Path) -> None:
    log = Run(tmp_path).log
    assert log.shown(dict.fromkeys(USERS_OWN, 0.5)) == dict.fromkeys(USERS_OWN, 0.5)
    assert log.shown(dict.fromkeys(("mismatch/seq_kl", "eval_mismatch/seq_kl"), 0.5)) == {}
    assert not any(map(of_layer, USERS_OWN)) and of_layer("mismatch/routing/layer_3_set_mismatch")


def evaluate(run: Run, step: int, split: str = "eval/default", reward: float = 0.5) -> None:
    with run.log.evaluation(step):
        run.log.write(step, {"reward": reward}, split)


def train(run: Run, steps: range, resume_step: int | None = None) -> None:
    run.log.begin(resume_step)
    for step in steps:
        run.log.write(step, {"reward": float(step)})


def ending(folder: Path) -> tuple[str, str]:
    end = read_run(folder).ending
    return end.of, end.status


def test_an_evaluation_is_a_segment_that_ends_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.log.evaluation(7):
        for split in ("eval/familiar", "eval/unfamiliar"):
            evaluate(run, 7, split)  # TRL evaluates each of several sets by a call of its own
            assert ending(tmp_path) == ("evaluation", "open")
    assert ending(tmp_path) == ("evaluation", "completed")
    with pytest.raises(ValueError, match="gone"), run.log.evaluation(7):
        raise ValueError("gone")
    evaluate(run, 7, "eval/long")  # which does not make up for the one that failed
    data = read_run(tmp_path)
    assert (data.ending.status, data.ending.message) == ("failed", "ValueError: gone")


def test_an_evaluation_goes_with_the_training_that_follows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(Run(tmp_path), range(1, 4))
    resumed = Run(tmp_path)
    evaluate(resumed, 0)
    train(resumed, range(3, 4), 2)
    data = read_run(tmp_path)
    assert data.series("reward") == ([1, 2, 3], [1.0, 2.0, 3.0]) and data.series("reward", "eval/default")[0] == [0]
    assert caplog.text == ""
    files = {file: file.read_bytes() for file in segment_files(tmp_path)}
    train(Run(tmp_path), range(1, 2))
    assert read_run(tmp_path).series("reward") == ([1], [1.0])
    assert all(file.read_bytes() == before for file, before in files.items())
    assert caplog.text.count("holds an earlier run; its files stay, and no report reads them") == 1


def test_what_each_split_observes_is_its_own(tmp_path: Path) -> None:
    log = Run(tmp_path).log
    log.begin()
    for split, gap in (("train", 0.5), ("eval/default", 0.25), ("train", 0.5)):
        log.sums.add_gap(split, **logprobs(gap))
    log.sums.add_gap("eval/default", **logprobs(0.125), native=True)
    name = "logp_abs_diff_mean"
    trained, evaluated = log.flush("train", 1), log.flush("eval/default", 1)
    assert (trained[f"mismatch/{name}"], trained["mismatch/tokens"]) == (0.5, 12)
    assert (evaluated[f"mismatch/{name}"], evaluated[f"mismatch/native/{name}"]) == (0.25, 0.125)
    assert log.flush("train", 2) == {} == log.flush("eval/default", 2)


def test_what_a_correction_masks_is_logged_where_no_gap_was_measured(tmp_path: Path) -> None:
    log = Run(tmp_path).log
    log.begin()
    response_mask = torch.ones(2, 3, dtype=torch.bool)
    log.mask("train", torch.zeros(2, 3), response_mask)
    logged = log.flush("train", 1)
    assert (logged["mismatch/masked_token_frac"], logged["mismatch/masked_seq_frac"]) == (1.0, 1.0)


def test_an_evaluation_raises_no_alarm_and_ends_no_run(tmp_path: Path) -> None:
    run = Run(tmp_path, x=STOP)
    run.log.begin(None)
    run.log.sums.add_gap("eval/default", **logprobs(0.5))
    logged = run.log.log(0, {"x": 9.0}, "eval/default")
    assert logged.stop is None and logged.metrics["mismatch/tokens"] == 6 and run.told == []
    assert read_run(tmp_path).series("x", "eval/default") == ([0], [9.0])


@pytest.mark.parametrize(("names", "length"), [(None, "length"), (VERL, "response_length/mean")])
def test_the_same_alarms_whatever_the_host_calls_a_metric(tmp_path: Path, names: HostNames | None, length: str) -> None:
    run = Run(tmp_path, names=names, length=STOP, misspelt={"above": 1.0})
    run.log.begin(None)
    logs = [run.log.log(step, {length: value}) for step, value in enumerate((0.5, 2.0, 3.0, 0.5), 1)]
    assert [log.stop is not None for log in logs] == [False, True, False, False]
    assert logs[1].metrics["mismatch/alarms_raised"] == 1 and run.log.stopped == logs[1].stop
    run.at = 4
    run.log.end("completed")
    found = [(e.step, e.level, e.data["status"]) for e in events(tmp_path, "alarm")]
    assert found == [(2, "warning", "raised"), (4, "info", "cleared")]
    assert [e.step for e in events(tmp_path, "unwatched")] == [1]  # said once, at the first log
    assert read_run(tmp_path).ends[-1].message == logs[1].stop


def test_a_full_disk_ends_nothing_and_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, x=STOP)
    run.log.begin(None)
    run.log.log(1, {"x": 0.5})

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        run.log.event("info", "lost", "with the step")
        stop = run.log.log(2, {"x": 2.0}).stop
    assert stop is not None  # alarms need no file
    (said,) = (text for text in run.told if "No space left" in text)
    assert "The run goes on" in said
    run.log.log(3, {"x": 0.5})
    run.log.end("completed")
    written = read_run(tmp_path)
    assert [record.step for record in written.steps] == [1, 3] and not written.problems
    assert len(events(tmp_path, "lines_lost")) == 1 and [end.status for end in written.ends] == ["completed"]


def test_a_terminal_that_is_gone_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("the terminal is gone")

    run = Run(tmp_path)
    run.log.begin(None)
    monkeypatch.setattr(sys, "stdout", Gone())
    run.log.announce()
    run.log.end("completed")
    assert [end.status for end in read_run(tmp_path).ends] == ["completed"]


class Other:
    """Ranks of two, of which another rank has said this."""

    size = 2

    def __init__(self, rank: int, said: Any = None) -> None:
        self.rank, self.said, self.asked = rank, said, 0

    def gather(self, value: Any) -> list[Any]:
        self.asked += 1
        return [value, self.said] if self.rank == 0 else [self.said, value]

    def sum(self, values: Tensor) -> Tensor:
        return values + float(self.said is not None)


def test_the_main_process_decides_and_all_ranks_stop_together(tmp_path: Path) -> None:
    main, other = Other(0), Other(1, said="stop, says the main process")
    first, second = Run(tmp_path, ranks=main, x=STOP), Run(tmp_path / "nowhere", ranks=other, x=STOP)
    first.log.begin(None)
    second.log.begin(None)
    # The other rank's own metric is healthy, or broken: neither decides.
    assert first.log.watch(1, {"x": 2.0}) is not None
    assert second.log.watch(1, {"x": 0.0}) == second.log.stopped == "stop, says the main process"
    other.said = None
    assert second.log.watch(2, {"x": 9.0}) is None
    assert main.asked == other.asked == 1  # words travel only if there is something to say
    assert not (tmp_path / "nowhere").exists()


def test_alarms_go_on_and_what_begins_anew_is_said(tmp_path: Path) -> None:
    rule = {"above": 1.0, "patience": 2}
    first = Run(tmp_path, x=rule, y=rule, z=STOP)
    first.log.begin(None)
    first.log.sums.add_gap("train", **logprobs(0.5))
    first.log.log(1, {"x": 2.0, "y": 2.0, "z": 2.0})
    saved = json.loads(json.dumps(first.log.state_dict()))
    assert saved["log"]["growths"]["k3"]["points"] and saved["log"]["growths"]["log_odds"]["points"]

    second = Run(tmp_path, x=rule, y=rule | {"above": 1.5}, z=STOP)
    second.log.load_state_dict(saved, step=1)
    second.log.begin(1)
    logged = second.log.log(2, {"x": 2.0, "y": 2.0, "z": 2.0})
    raised = [e.data["metric"] for e in events(tmp_path, "alarm") if e.step == 2]
    assert raised == ["x", "z"]  # x goes on with its streak, y has another rule, z stops it again
    assert logged.stop is not None
    assert [e.data["metrics"] for e in events(tmp_path, "alarms_anew")] == [["y"], ["z"]]
    assert json.loads(json.dumps(second.log.state_dict()["log"])) == saved["log"]


def test_a_run_that_never_began_ends_without_a_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.log.end("failed", "before the first step")
    assert list(tmp_path.iterdir()) == []
