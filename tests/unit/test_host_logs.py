"""Logs that TRL and verl write without this package, written here by their own code."""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mismatch_ext.adapters.doctor.options import configure

from mismatch_ext import cli
from mismatch_ext.alarms import HEALTHY_K3, STALE_ABS_DIFF
from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.names import Role
from mismatch_ext.report import build, judge, load_runs, summarize
from mismatch_ext.report.levels import HEALTHY_ABS_DIFF, LARGE_K3
from mismatch_ext.report.sentences import DOCTOR
from tests.commands import ROOT
from tests.unit.synthetic_runs import write_run

GAPS = (0.001, 0.002, 0.06)
TRL_LOGS = [
    {
        "loss": 0.1,
        "reward": 0.4 + step / 10,
        "learning_rate": 1e-6,
        "completions/mean_length": 80.0,
        "sampling/sampling_logp_difference/mean": gap,
        "sampling/sampling_logp_difference/max": 10 * gap,
    }
    for step, gap in enumerate(GAPS)
]


def trainer_state(folder: Path) -> Path:
    from transformers import TrainerState

    path = folder / "run" / "checkpoint-3" / "trainer_state.json"
    path.parent.mkdir(parents=True)
    history = [{**logs, "step": step} for step, logs in enumerate(TRL_LOGS, start=1)]
    history.append({"eval_reward": 0.7, "step": 3})
    TrainerState(global_step=3, log_history=history).save_to_json(str(path))
    return path


def event_files(folder: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import rewrite_logs

    with SummaryWriter(folder / "events") as writer:
        for step, logs in enumerate(TRL_LOGS, start=1):
            for name, value in rewrite_logs(logs).items():
                writer.add_scalar(name, value, step)
        writer.add_scalar("eval/reward", 0.7, 3)
    return folder / "events"


@pytest.mark.parametrize("write", [trainer_state, event_files])
def test_trls_own_log(write: object, tmp_path: Path) -> None:
    ((name, run),) = load_runs(write(tmp_path)).items()  # type: ignore[operator]
    steps, gaps = run.series("mismatch/logp_abs_diff_mean")
    assert steps == [1, 2, 3] and gaps == pytest.approx([0.001, 0.002, 0.06])
    assert run.series(Role.REWARD)[1] == pytest.approx([0.4, 0.5, 0.6])
    assert run.series(Role.REWARD, "eval/eval")[1] == pytest.approx([0.7])
    judged = judge(name, run, summarize({name: run}))
    assert judged.level == "elevated" and judged.mean == pytest.approx(0.021)


def trls_console() -> str:
    from transformers.trainer_callback import ProgressCallback

    lines: list[str] = []
    callback, state = ProgressCallback(), SimpleNamespace(is_world_process_zero=True)
    callback.training_bar = SimpleNamespace(write=lines.append)
    for step, logs in enumerate((*TRL_LOGS, {"train_runtime": 3.1}), start=1):
        callback.on_log(None, state, None, logs={**logs, "epoch": 0.1})
        lines.append(f"  1%|#  | {step}/300 [00:01<00:09]")
    return "\r".join(lines)


def verls_console() -> str:
    from verl.utils.logger.aggregate_logger import concat_dict_to_str

    rows = ({"critic/score/mean": 0.5, "rollout_corr/k3_kl": np.float64(gap)} for gap in GAPS)
    lines = (concat_dict_to_str(row, step) for step, row in enumerate(rows, start=1))
    return "".join(f"\x1b[36m(TaskRunner pid=3)\x1b[0m {line}\n" for line in lines)


# As the sources of the other two have it.
SLIME = "(Actor pid=9) [2026-05-28] model.py:480 - step {}: {{'train/loss': 0.1, 'train/train_rollout_logprob_abs_diff': {}}}\n"
PRIME_RL = "10:00:41 SUCCESS Step {} |  42.00s | Loss 0.1000 | Mismatch KL {:.4f} | Grad. Norm 0.0800 | LR 1.00e-06 | MFU 31.2%\n"
WANDB = '"{}","{}","{}"\n'
COLUMN = '"run - sampling/sampling_logp_difference/mean'
ABS_DIFF, K3 = "mismatch/logp_abs_diff_mean", "mismatch/k3_kl"


def lines_of(line: str) -> str:
    return "".join(line.format(step, gap, gap) for step, gap in enumerate(GAPS, start=1))


@pytest.mark.parametrize(
    ("name", "text", "metric"),
    [
        ("trl.txt", trls_console, ABS_DIFF),
        ("verl.log", verls_console, K3),
        ("slime.log", lambda: lines_of(SLIME), ABS_DIFF),
        ("prime.log", lambda: lines_of(PRIME_RL), K3),
        ("wandb.csv", lambda: f'"Step",{COLUMN}",{COLUMN}__MAX"\n{lines_of(WANDB)}', ABS_DIFF),
    ],
)
def test_what_people_paste_of_a_run(name: str, text: Callable[[], str], metric: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text())
    (run,) = load_runs(tmp_path / name).values()
    steps, gaps = run.series(metric)
    assert steps == [1, 2, 3] and gaps == pytest.approx(GAPS)
    assert "To learn why: mismatch-ext doctor" in build(tmp_path / name).verdict


@pytest.mark.parametrize(("k3", "level"), [(1e-5, "small"), (2e-3, "elevated"), (0.02, "large")])
def test_verls_file_logger_is_judged_by_k3(
    k3: float, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.utils.tracking import FileLogger

    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    logger = FileLogger("project", "experiment")
    for step in (1, 2):
        logger.log(
            {"rollout_corr/k3_kl": k3, "actor/lr": step * 1e-6, "critic/score/mean": 0.5, "actor/loss": 0.1}, step
        )
    logger.finish()
    path = tmp_path / "project" / "experiment.jsonl"
    ((name, run),) = load_runs(path).items()
    assert judge(name, run, summarize({name: run})).level == level
    assert run.series(Role.LEARNING_RATE) == ([2], [1e-6]), "stock verl logs the next step's rate"
    assert cli.main(["report", str(path)]) == 0
    # Other logs of this folder have reports of their own.
    assert path.with_name("experiment.jsonl.html").is_file() and not (path.parent / "report.html").exists()


def trl_log(folder: Path, gaps: Sequence[float], **rest: float) -> Path:
    """Write what TRL logs of these gaps, a log at each step."""
    name = "sampling/sampling_logp_difference/mean"
    history = [{"step": step, name: gap, "reward": 0.5, **rest} for step, gap in enumerate(gaps, 1)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": history}))
    return path


def verl_log(path: Path, rows: Sequence[Mapping[str, float | None]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "data": dict(row)}) for step, row in enumerate(rows, 1)]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def verdict_of(path: Path) -> tuple[str, dict[str, Any]]:
    report = build(path)
    (run,) = report.to_dict()["runs"].values()
    assert run["run"] in report.verdict
    return report.verdict, run


def test_stale_weights_in_the_last_steps_are_not_hidden_by_the_mean(tmp_path: Path) -> None:
    said, run = verdict_of(trl_log(tmp_path, [0.009] * 57 + [0.21] * 3))
    assert run["level"] == "warned" and "mean |Δlogp| 0.019" in said
    assert "From step 58 on the two sides differ by as much as with stale weights" in said
    assert "no correction is needed" not in said


def test_a_gap_that_ends_far_above_its_run_is_named_before_an_alarm_is_raised(tmp_path: Path) -> None:
    said, run = verdict_of(trl_log(tmp_path / "late", [0.004] * 57 + [0.03] * 3))
    assert run["level"] == "warned" and "no correction is needed" not in said
    assert "From step 58 on the gap has left the level of the steps before" in said
    assert "no correction is needed" in verdict_of(trl_log(tmp_path / "flat", [0.004, 0.006] * 30))[0]


def test_a_gap_that_grows_over_the_steps_is_named(tmp_path: Path) -> None:
    k3 = [4e-5 * 23 ** (step / 79) for step in range(80)]
    said, run = verdict_of(verl_log(tmp_path / "verl.jsonl", [{"rollout_corr/k3_kl": value} for value in k3]))
    assert (
        run["level"] == "warned" and "the gap has more than doubled" in said and "no correction is needed" not in said
    )


def test_a_mean_that_is_estimated_from_k3_is_judged_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").replace("\n", " ")
    elevated = f"*elevated* above a mean of {HEALTHY_ABS_DIFF} or a k3 of {HEALTHY_K3}"
    assert f"{elevated}, and *large* from {STALE_ABS_DIFF} or {LARGE_K3}. " in page
    said, run = verdict_of(verl_log(tmp_path / "verl.jsonl", [{"rollout_corr/k3_kl": 3.7e-4}] * 8))
    assert run["level"] == "elevated" and "a mean |Δlogp| of 0.022 is estimated" in said


def test_a_sequences_effective_sample_size_is_not_judged_as_that_of_tokens(tmp_path: Path) -> None:
    """Verl has one name for both."""
    rows = [{"rollout_corr/k3_kl": 2e-4, "rollout_corr/rollout_is_eff_sample_size": 0.2}] * 5
    said, run = verdict_of(verl_log(tmp_path / "verl.jsonl", rows))
    assert run["level"] == "small" and "importance weight" not in said
    assert "ess_token" not in build(tmp_path / "verl.jsonl").problems[0]


def test_a_resumed_runs_event_files_are_one_log(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    name = "train/sampling/sampling_logp_difference/mean"
    for part, (gap, steps) in enumerate(((0.01, range(1, 12)), (0.3, range(10, 20)))):
        with SummaryWriter(tmp_path / "written") as writer:
            for step in steps:
                writer.add_scalar(name, gap, step)
        # The name holds the time in whole seconds.
        (written,) = (tmp_path / "written").iterdir()
        (tmp_path / "run").mkdir(exist_ok=True)
        written.rename(tmp_path / "run" / f"events.out.tfevents.{part}.host")
    (run,) = load_runs(tmp_path / "run").values()
    steps, gaps = run.series("mismatch/logp_abs_diff_mean")
    assert steps == list(range(1, 20)) and gaps == pytest.approx([0.01] * 9 + [0.3] * 10)
    assert "2 event files are read as one resumed run" in run.problems[1]


IN_ROUTING = re.findall("`(mismatch-ext doctor [^`]*)`", (ROOT / "docs/routing.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", [*DOCTOR.values(), *IN_ROUTING])
def test_a_command_of_the_doctor_has_what_it_requires(command: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    configure(parser)
    read = parser.parse_args(command.partition(",")[0].split()[2:])
    assert read.out == Path("DIR") and (read.trl == Path("FILE") or read.verl == ["OVERRIDES"])


def test_a_folder_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    trl_log(tmp_path / "good", [0.01])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "trainer_state.json").write_text('{"log_history": []}')
    ((name, run),) = load_runs(tmp_path).items()
    assert name == "good" and run.problems[-1].startswith("the folder empty was left out: ")
    assert "holds no step" in run.problems[-1]


def test_a_checkpoint_without_a_number_is_not_the_last(tmp_path: Path) -> None:
    for name, steps in (("checkpoint-9", 2), ("checkpoint-10", 3), ("checkpoint-best", 1), ("checkpoint-11-merged", 1)):
        trl_log(tmp_path / name, [0.01] * steps)
    (run,) = load_runs(tmp_path).values()
    assert run.last_step == 3


def test_steps_that_a_loss_scale_skips_at_the_start_are_no_warning(tmp_path: Path) -> None:
    def rows(skipped: int, before: int = 0) -> list[dict[str, float | None]]:
        norms = [0.5] * before + [None] * skipped + [0.5] * 10
        return [{"rollout_corr/k3_kl": 1e-5, "actor/grad_norm": norm} for norm in norms]

    said, run = verdict_of(verl_log(tmp_path / "warm.jsonl", rows(3)))
    assert run["level"] == "small" and "gradients" not in said
    for name, log in (("long", rows(5)), ("later", rows(3, before=4))):
        said, run = verdict_of(verl_log(tmp_path / f"{name}.jsonl", log))
        assert run["level"] == "warned" and "the gradients hold NaN or infinity" in said, name


def test_gradients_that_are_not_finite_are_named(tmp_path: Path) -> None:
    """orjson, which verl's file logger writes with, makes null of NaN."""
    rows = [{"rollout_corr/k3_kl": 1e-5, "actor/grad_norm": None if step > 36 else 0.5} for step in range(1, 41)]
    said, run = verdict_of(verl_log(tmp_path / "verl.jsonl", rows))
    assert run["level"] == "warned"
    assert "From step 37 on the gradients hold NaN or infinity" in said


def test_logs_of_several_runs_are_shown_side_by_side(tmp_path: Path) -> None:
    trl_log(tmp_path / "mixed" / "a", [0.01])
    verl_log(tmp_path / "mixed" / "b" / "b.jsonl", [{"rollout_corr/k3_kl": 2e-3}])
    write_run(tmp_path / "mixed" / "c" / "mismatch", "fp16", steps=2)
    assert list(load_runs(tmp_path / "mixed")) == ["a", "b", "fp16"]


def test_an_empty_log_is_an_error_and_one_without_a_gap_says_what_logs_it(tmp_path: Path) -> None:
    for name, text in (("empty.jsonl", ""), ("trainer_state.json", '{"log_history": []}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(RunDirectoryError, match="holds no step"):
            build(tmp_path / name)
    report = build(verl_log(tmp_path / "plain.jsonl", [{"actor/loss": 0.1}, {"actor/loss": None}]))
    assert "From step 2 on the weights are broken" in report.verdict
    assert report.problems[0].endswith("+mismatch={}.")
    # These tell how probabilities differ, and not the size of the gap.
    report = build(verl_log(tmp_path / "probs.jsonl", [{"training/rollout_probs_diff_max": 0.1}] * 3))
    assert "Neither mean |Δlogp| nor k3" in report.verdict


def ratio_log(folder: Path, ratios: Sequence[float], gap: float = 0.0031) -> Path:
    """Write TRL's own log of a run with these mean importance weights."""
    folder.mkdir(parents=True, exist_ok=True)
    history = [
        {
            "step": step,
            "sampling/sampling_logp_difference/mean": gap,
            "sampling/importance_sampling_ratio/mean": ratio,
        }
        for step, ratio in enumerate(ratios, start=1)
    ]
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": history}))
    return path


def test_weights_that_leave_little_of_the_update_are_named_beside_a_small_gap(tmp_path: Path) -> None:
    ratios = [0.95 * math.exp(-step / 110) for step in range(1, 301)]
    said, run = verdict_of(ratio_log(tmp_path, ratios))
    first = next(step for step, ratio in enumerate(ratios, start=1) if ratio < 0.7)
    assert (
        f"From step {first} on the mean importance weight is below 0.7" in said
        and "no correction is needed" not in said
    )
    after = ratios[first - 1 :]
    assert f"weights leave {sum(after) / len(after):.0%} of the update" in said
    assert run["level"] == "warned" and len(run["warnings"]) == 1
    assert "vllm_importance_sampling_mode: token_truncate" in said


@pytest.mark.parametrize(
    ("ratios", "gap"),
    [
        ([0.95] * 10 + [0.4] + [0.95] * 10, 0.0031),  # one batch
        ([0.5] * 20, 0.05),  # not beside a small gap: the gap itself is what to look at
    ],
)
def test_weights_that_leave_the_update_or_stand_beside_a_large_gap_are_not_named(
    ratios: list[float], gap: float, tmp_path: Path
) -> None:
    said, _ = verdict_of(ratio_log(tmp_path, ratios, gap))
    assert "importance weight" not in said


def with_outliers(path: Path, at: Mapping[int, float], steps: int = 120) -> Path:
    draw = random.Random(3)
    sizes = [at.get(step, 2e-4 * math.exp(draw.gauss(0, 0.1))) for step in range(1, steps + 1)]
    return verl_log(path, [{"rollout_corr/k3_kl": size, "critic/score/mean": 0.5} for size in sizes])


def test_one_step_far_above_all_others_is_an_outlier_and_not_the_level_of_the_run(tmp_path: Path) -> None:
    said, run = verdict_of(with_outliers(tmp_path / "exp.jsonl", {77: 1.9}))
    assert run["level"] == "warned" and "stale weights" not in said
    assert "Step 77 is an outlier step" in said
    assert run["outliers"] == (77,) and run["k3"] == pytest.approx(2e-4, rel=0.05)
    without, _ = verdict_of(with_outliers(tmp_path / "without.jsonl", {}))
    assert "outlier" not in without and "small gap" in without


@pytest.mark.parametrize(
    "at",
    [
        dict.fromkeys(range(40, 80), 1.9),  # a third of the run
        dict.fromkeys(range(116, 121), 1.9),  # the run has changed for good
        {120: 1.9},  # it may be about to
    ],
)
def test_steps_that_are_no_exception_keep_their_level(at: dict[int, float], tmp_path: Path) -> None:
    said, run = verdict_of(with_outliers(tmp_path / "exp.jsonl", at))
    assert run["level"] == "large" and "outlier" not in said
