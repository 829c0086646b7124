"""The command that trains the real model in two dtypes: what it trains again, and what it records and draws."""

from __future__ import annotations

import json
from pathlib import Path

from examples import real_learning
from examples.real_learning import Run
from mismatch_ext import MismatchConfig


def test_every_commands_config_is_one(tmp_path: Path) -> None:
    for arm in real_learning.ARMS:
        command = Run(arm=arm, seed=0, folder=tmp_path).command(3, Path("model"))
        block = MismatchConfig.parse(json.loads(command[command.index("--mismatch") + 1]))
        assert block is not None and block.precision is not None and "--resume_from_checkpoint" not in command
