"""This package's trainer for each mode of verl's V1 trainer: the class that verl's registry gives for the mode, with the block.

`sync` samples and trains in turns. `colocate_async` aborts what is in flight before it trains and resumes it afterwards, and
`separate_async` samples on servers of its own while it trains, several updates between two weight updates
(`parameter_sync_step`). In both the rollouts of a batch may be of older weights, and partly of several.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer
from mismatch_ext.adapters.verl.refusals import MODES, SEPARATE, trainer_of
from mismatch_ext.adapters.verl.worker import MismatchDetachWorker
from verl.trainer.ppo.v1 import trainer_colocate_async, trainer_separate_async, trainer_sync  # noqa: F401 - they register
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls, register_trainer

# The one line that this mode logs at INFO, verl's default, has an argument of `print`, `flush`: a TypeError where it is logged.
trainer_separate_async.logger.setLevel(max(trainer_separate_async.logger.level, logging.WARNING))


class DetachedWorkers(MismatchTrainer):
    """A trainer whose workers can put weights aside, to compute π_old of the updates between two weight updates."""

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
