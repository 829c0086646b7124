"""How a run in verl describes itself: the header of its metrics file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mismatch_ext.adapters.verl.driver.reports import Checked
from omegaconf import DictConfig

from mismatch_ext.config import MismatchConfig
from mismatch_ext.log import run_info
from mismatch_ext.names import VERL
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.versions import installed

PACKAGES = ("transformers", "verl", "ray")


def info_of(
    config: DictConfig,
    block: MismatchConfig,
    checked: Checked,
    patches: list[dict[str, Any]],
    sampling: SamplingSettings,
    host: str,
) -> dict[str, Any]:
    """Return the header of a run's metrics file.

    Args:
        config: verl's configuration.
        block: The parsed block.
        checked: What the processes run with, as the check before the first step found it.
        patches: Descriptions of the patches in use in the driver.
        sampling: Settings that the engine samples with.
        host: Name of verl's trainer.
    """
    worker, engine = checked.worker, checked.engine
    trainer, stock = config.trainer, block.level == "observe"
    return run_info(
        block,
        dataclasses.replace(VERL, next_rate=stock or not logs_applied_rate(worker)),
        name=f"{trainer.project_name}/{trainer.experiment_name}",
        host=f"verl {installed('verl')} {host}",
        model=str(config.actor_rollout_ref.model.path),
        model_type=str(worker.get("model_type", "")),
        parameters=sum(checked.trainer.parameter_dtypes.values()),
        device=str(checked.trainer.device),
        seed=int(config.actor_rollout_ref.rollout.seed),
        trainer=checked.trainer,
        engine=engine,
        sampling=sampling,
        more={
            "worker": {key: worker[key] for key in ("engine", "strategy", "loss", "versions", "moe") if key in worker}
        },
        patches=[*patches, *worker.get("patches", []), *checked.patches],
        audit=checked.audit,
        packages=(*PACKAGES, engine.engine),
    )


def logs_applied_rate(report: Mapping[str, Any]) -> bool:
    """Return whether `actor/lr` is the rate that an update applied; stock engines log the rate of the next update.

    Args:
        report: A worker's own report.
    """
    steered = report.get("lr") is not None
    return steered or (report.get("strategy") != "megatron" and report.get("scaler") is not None)
