"""This package's trainer for each mode of verl's V1 trainer: the class that verl's registry gives for the mode, with the block.

`sync` samples and trains in turns. `colocate_async` aborts what is in flight before it trains and resumes it afterwards, and
`separate_async` samples on servers of its own while it trains, several updates between two weight updates
(`parameter_sync_step`). In both the rollouts of a batch may be of older weights, and partly of several.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
import verl.trainer.ppo.v1.trainer_colocate_async
import verl.trainer.ppo.v1.trainer_separate_async
import verl.trainer.ppo.v1.trainer_sync
from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer
from mismatch_ext.adapters.verl.refusals import MODES, SEPARATE, trainer_of
from mismatch_ext.adapters.verl.worker import MismatchDetachWorker
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls, register_trainer


class DetachedWorkers(MismatchTrainer):
    """A trainer whose workers can put weights aside, to compute π_old of the updates between two weight updates."""

    def _setup(self) -> None:
        """Start workers and servers as verl does, without one line of its log.

        verl 0.9.1 logs that line with `flush=True`, an argument of `print`. This is a TypeError wherever lines of INFO are shown,
        as they are unless VERL_LOGGING_LEVEL says otherwise.
        """
        logger = verl.trainer.ppo.v1.trainer_separate_async.logger
        level = logger.level
        logger.setLevel(max(level, logging.WARNING))
        try:
            super()._setup()
        finally:
            logger.setLevel(level)

    def _init_resource_pool_mgr(self) -> None:
        """Map verl's roles as it does, with our worker where it has its own; the reference may have a role for itself."""
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            if "actor" in str(role) or str(role) == "ref":
                self.role_worker_mapping[role] = ray.remote(MismatchDetachWorker)


TRAINERS: dict[str, type[Any]] = {}
"""This package's trainer of each mode."""

for _mode in MODES:
    _ours = DetachedWorkers if _mode == SEPARATE else MismatchTrainer
    _host = get_trainer_cls(_mode)
    TRAINERS[_mode] = register_trainer(trainer_of(_mode))(
        type(f"Mismatch{_host.__name__}", (_ours, _host), {"host_mode": _mode, "__module__": __name__})
    )
