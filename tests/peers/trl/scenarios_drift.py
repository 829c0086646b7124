"""Runs with a peer that has changed, or says that it is of a version that nobody has run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import vllm

from mismatch_ext.errors import MismatchError
from tests.peers.trl.scenarios_training import build, outcome


def drifted(
    model: str, out: str, refused: list[Any], asking: dict[str, Any], block: Any, **overrides: Any
) -> dict[str, Any]:
    """Try blocks that ask for what has changed, then train with one that asks for all else."""
    messages, started = [], []
    start = vllm.LLM.__init__

    def starting(self: Any, *args: Any, **kwargs: Any) -> None:
        started.append(kwargs)
        start(self, *args, **kwargs)

    with mock.patch.object(vllm.LLM, "__init__", starting):
        for number, asked in enumerate(refused):
            try:
                build("/nowhere/model", f"{out}/refused{number}", asked, **asking)
            except MismatchError as error:
                messages.append(f"{type(error).__name__}: {error}")
        early = len(started)
        trainer = build(model, f"{out}/run", block, **overrides)
        trainer.train()
    return outcome(trainer, messages=messages, engines_before=early, engines=len(started))
