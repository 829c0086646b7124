"""One short run in each host with the same block: what its metrics file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch_ext.log_reading import read_run
from mismatch_ext.names import Role

RATE = {"period": 2, "warmup_steps": 0}
# Of a rate of 1e-3, halved every second step: raised at the first, over at the third; the fourth log ends the run.
ALARMS = {
    "learning_rate": {"above": 9e-4, "patience": 1},
    "grad_norm": {"below": 1e9, "patience": 4, "action": "stop"},
    "misspelt": {"above": 1.0},
}
BLOCK = {"lr": RATE, "monitor": {"default_alarms": False, "alarms": ALARMS}}
STEPS = 4


def written(run_dir: Path) -> dict[str, Any]:
    """Return what a metrics file holds, with the host's own names of metrics as roles."""
    run = read_run(run_dir)
    header = run.header
    return {
        "keys": {key: sorted(value) if isinstance(value, dict) else value for key, value in header.items()},
        "known": {key: value not in (None, "") for key, value in header["run"].items()},
        "events": [
            [event.step, event.level, event.name, run.names.role(event.data["metric"]), event.data.get("status")]
            for event in run.events
            if event.name in ("alarm", "unwatched")
        ],
        "rate": [
            {name: value for name, value in step.metrics.items() if name.startswith("mismatch/lr")}
            | {"learning_rate": step.metrics[run.names.of(Role.LEARNING_RATE)]}
            for step in run.steps
            if "mismatch/lr_multiplier" in step.metrics
        ],
        "end": [[end.status, run.names.of(Role.GRAD_NORM) in end.message] for end in run.ends],
    }


def in_trl(model: str, out: str) -> dict[str, Any]:
    """Train by the trainer and by the callback."""
    from mismatch_ext.adapters.trl import MismatchCallback, MismatchGRPOConfig, MismatchGRPOTrainer
    from trl import GRPOConfig, GRPOTrainer

    from tests.peers.trl.scenarios_training import arguments, graded, rows

    def built(name: str, block: Any) -> Any:
        given = arguments(
            f"{out}/{name}",
            use_vllm=False, bf16=False, max_completion_length=4, max_steps=6, lr_scheduler_type="constant",
        )  # fmt: skip
        rest = {"model": model, "reward_funcs": graded, "train_dataset": rows(40)}
        if name == "callback":
            return GRPOTrainer(args=GRPOConfig(**given), callbacks=[MismatchCallback(block)], **rest)
        return MismatchGRPOTrainer(args=MismatchGRPOConfig(**given, mismatch=block), **rest)

    found: dict[str, Any] = {}
    for name in ("trainer", "callback"):
        built(name, BLOCK).train()
        found[name] = written(Path(out) / name / "mismatch")
    return found


def in_verl(model: str, out: str) -> dict[str, Any]:
    """Update by verl's real worker, and log by our driver's own methods."""
    import tests.peers.verl.in_process  # noqa: F401, what verl reads when it is imported

    # isort: split

    import mismatch_ext.adapters.verl.driver.modes  # noqa: F401  # registers a trainer for each of verl's modes
    from mismatch_ext.adapters.verl.driver.processes import Processes
    from mismatch_ext.adapters.verl.driver.reports import Checked
    from mismatch_ext.adapters.verl.refusals import SYNC, trainer_of
    from omegaconf import open_dict
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    from mismatch_ext.checks import Checks
    from mismatch_ext.config import MismatchConfig
    from mismatch_ext.precision.audit import EngineReading, TrainerReading
    from tests.peers.verl.in_process.losses import host_config
    from tests.peers.verl.in_process.workers import batch, scored, update, worker
    from tests.peers.verl.recorded import recorded

    optimizer = {"lr": 1e-3, "lr_scheduler_type": "constant"}
    built = worker(model, BLOCK, optimizer=optimizer)
    data = scored(built, batch())
    config = host_config(f"actor_rollout_ref.model.path={model}")
    with open_dict(config):
        config.trainer.default_local_dir = out
    block = MismatchConfig.parse(BLOCK)
    assert block is not None
    # What verl's own constructor makes, which starts Ray, is not there: these methods need none of it.
    driver: Any = object.__new__(get_trainer_cls(trainer_of(SYNC)))
    driver.config, driver.global_steps = config, 0
    driver._block, driver._checks, driver._kl, driver._draws = block, Checks(True), None, None
    driver._waiting, driver._weights = [], None
    driver._updated_step = driver._saved_step = driver.total_training_steps = 0
    driver._processes = Processes(config, block, driver._checks, "PPOTrainerSync")
    driver._log = driver._processes.log = driver._new_log(config)
    reports = recorded("dense")
    report, rollout = reports["workers"][0], reports["rollouts"][0]["reports"][0]
    driver._processes._checked = Checked(
        worker=report,
        trainer=TrainerReading(**report["trainer"]),
        engine=EngineReading(**rollout["reading"]),
        audit=None,
    )
    driver._log.sampled_with(driver._processes.sampling)
    driver._log.begin(None)
    for step in range(1, STEPS + 1):
        built.engine.mismatch_update_lr()
        told = update(built, data)
        metrics = {"actor/lr": told["lr"][0], "actor/grad_norm": float(told["grad_norm"][0])}
        metrics |= {f"mismatch/{name}": value for name, value in built.engine.mismatch_metrics().items()}
        driver.global_steps = driver._updated_step = driver._saved_step = step
        driver._record(metrics, step)
    driver._log.end("completed", step=driver._updated_step)
    found: dict[str, Any] = {"verl": written(Path(out) / "mismatch"), "stopped": driver.total_training_steps}
    return found
