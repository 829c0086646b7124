"""verl's `trainer.rollout_data_dir` and `validation_data_dir`: a line of JSON a response, with texts and no token ids.

Written by `_write_generations` of `verl/trainer/ppo/ray_trainer.py` and of `verl/trainer/ppo/v1/trainer_base.py`
(0.9.1): the keys `input`, `output`, `gts`, `score`, `step` and those of the reward function; texts are decoded without
special tokens, so that no tokenizer gives the ids back, and the engine's log-probabilities are in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from mismatch_ext.errors import RecordError

HOST = "verl"
KEYS = {"input", "output", "score", "step"}


def is_verls(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is one of verl's."""
    return row.keys() >= KEYS


def refuse(where: str) -> NoReturn:
    """Say what is missing.

    Raises:
        RecordError: Always.
    """
    raise RecordError(
        f"{where} is of verl's trainer.rollout_data_dir or validation_data_dir, which holds texts alone; the doctor needs token "
        "ids and the engine's log-probabilities: write records with mismatch_ext.rollouts.write_rollouts."
    )
