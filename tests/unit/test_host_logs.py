"""Logs that TRL and verl write without this package, written here by their own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext import cli
from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.names import Role
from mismatch_ext.report import build, judge, load_runs, summarize

TRL_LOGS = [
    {
        "loss": 0.1,
        "reward": 0.4 + step / 10,
        "learning_rate": 1e-6,
        "completions/mean_length": 80.0,
        "sampling/sampling_logp_difference/mean": gap,
        "sampling/sampling_logp_difference/max": 10 * gap,
    }
    for step, gap in enumerate((0.001, 0.002, 0.06))
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
    (problem,) = run.problems
    assert "logp_abs_diff_mean" in problem.split("Missing:")[0] and "k3_kl" in problem.split("Missing:")[1]


def test_the_last_checkpoint_of_an_output_folder_is_read(tmp_path: Path) -> None:
    path = trainer_state(tmp_path)
    older = path.parents[1] / "checkpoint-2" / path.name
    older.parent.mkdir()
    older.write_text('{"log_history": []}')
    (run,) = load_runs(path.parents[1]).values()
    assert run.last_step == 3


@pytest.mark.parametrize(("k3", "level"), [(0.0, "small"), (1e-5, "small"), (2e-3, "elevated"), (0.02, "large")])
def test_verls_file_logger_is_judged_by_k3(
    k3: float, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    printed = capsys.readouterr().out
    assert str(path.with_name("report.html")) in printed and "calculate_log_probs=true" in printed
    assert (path.parent / "report.html").is_file()


def test_a_log_without_figures_of_the_gap_is_not_judged(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text('{"log_history": [{"step": 1, "reward": 0.5}]}')
    report = build(tmp_path)
    assert "No mismatch metrics were recorded" in report.verdict
    assert "no figure of the gap" in report.problems[0] and "attach(trainer)" in report.problems[0]


@pytest.mark.parametrize("text", ["[]", "{}", '{"log_history": [{}]}', "no json"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(text)
    with pytest.raises(RunDirectoryError, match=r"is not a log of TRL or verl"):
        build(path)
