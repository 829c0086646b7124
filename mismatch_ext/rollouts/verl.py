"""verl's `trainer.rollout_data_dir` and `validation_data_dir`: one line of JSON per response, with texts but no token ids.

`_write_generations` of `verl/trainer/ppo/ray_trainer.py` and of `verl/trainer/ppo/v1/trainer_base.py` (0.9.1) writes
the keys `input`, `output`, `gts`, `score`, `step` and those of the reward function. The texts are decoded without
special tokens, so no tokenizer can recover the ids. The engine's log-probabilities are not in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from mismatch_ext.errors import RecordError

HOST = "verl"
KEYS = {"input", "output", "score", "step"}


def is_verls(row: Mapping[str, Any]) -> bool:
    """Whether a row is in verl's format."""
    return row.keys() >= KEYS


def refuse(where: str) -> NoReturn:
    """Say what the file lacks.

    Raises:
        RecordError: Always.
    """
    raise RecordError(
        f"{where} is of verl's trainer.rollout_data_dir or validation_data_dir, which holds texts alone; the doctor needs token "
        "ids and the engine's log-probabilities: write records with mismatch_ext.rollouts.write_rollouts."
    )
