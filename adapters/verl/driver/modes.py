"""This package's trainer for each mode of verl's V1 trainer: the class that verl's registry gives for the mode, with the block.

`sync` samples and trains in turns. `colocate_async` aborts what is in flight before it trains and resumes it afterwards, and
`separate_async` samples on servers of its own while it trains, several updates between two weight updates
(`parameter_sync_step`). In both the rollouts of a batch may be of older weights, and partly of several.
"""

from __future__ import annotations

import logging
from typing import Any

from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer
from mismatch_ext.adapters.verl.refusals import MODES, SEPARATE, trainer_of
from mismatch_ext.adapters.verl.worker import MismatchDetachWorker, MismatchWorker
from verl.trainer.ppo.v1 import trainer_colocate_async, trainer_separate_async, trainer_sync  # noqa: F401 - they register
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls, register_trainer

# A line that this mode logs at INFO, verl's default, has an argument of `print`, `flush`: a TypeError where it is logged. Its
# other lines at INFO go with it.
_logger = logging.getLogger(trainer_separate_async.__name__)
_logger.setLevel(max(_logger.level, logging.WARNING))


TRAINERS: dict[str, type[Any]] = {}
"""This package's trainer of each mode."""

for _mode in MODES:
    _host = get_trainer_cls(_mode)
    _own = {"host_mode": _mode, "worker": MismatchDetachWorker if _mode == SEPARATE else MismatchWorker}
    TRAINERS[_mode] = register_trainer(trainer_of(_mode))(
        type(f"Mismatch{_host.__name__}", (MismatchTrainer, _host), {**_own, "__module__": __name__})
    )
