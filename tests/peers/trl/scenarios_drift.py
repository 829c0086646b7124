"""Runs with a peer that has changed, or says that it is of a version that nobody has run."""

from __future__ import annotations

import warnings
from importlib import metadata
from typing import Any
from unittest import mock

import vllm

from mismatch_ext.errors import MismatchError, UntestedVersionWarning
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


def of_version(model: str, out: str, block: Any, newer: dict[str, str], **overrides: Any) -> dict[str, Any]:
    """Train while the metadata, and nothing else, says that peers are of other versions."""
    real = metadata.version
    with (
        mock.patch.object(metadata, "version", lambda name: newer.get(name) or real(name)),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        trainer = build(model, out, block, **overrides)
        trainer.train()
    told = [str(one.message) for one in caught if issubclass(one.category, UntestedVersionWarning)]
    return outcome(trainer, told=told)
