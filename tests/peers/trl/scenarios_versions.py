"""Blocks on a TRL that nobody has run, in an interpreter whose path begins with a copy of it."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import trl

from mismatch_ext.errors import SeamError, UntestedVersionWarning
from tests.peers.trl.scenarios_training import build, digest_of

WITH_ENGINE: tuple[dict[str, Any], ...] = (
    {"kl": {"coef": 0.1}, "correction": {"preset": "decoupled_token_is"}},
    {"routing": {"mode": "R3"}},
    {"sampling_mask": {}},
    {"precision": {"dtype": "float32"}, "lr": {}},
)


class Reached(Exception):
    """TRL has come to start its engine: nothing was refused."""


def newer(model: str, out: str) -> dict[str, Any]:
    """Construct a trainer with each section, train two of them a step, and return what was warned of and refused."""
    plain = {"use_vllm": False, "max_steps": 1, "bf16": False, "per_device_train_batch_size": 4}
    refused = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UntestedVersionWarning)
        with mock.patch("vllm.LLM.__init__", side_effect=Reached):
            for block in WITH_ENGINE:
                try:
                    build(model, out, block, top_k=8)
                except Reached:
                    pass
                except SeamError as error:
                    refused.append(str(error))
        moved = []
        for block in ({"kl": {"coef": 0.1}}, {"routing": {"mode": "R2"}}):
            trainer = build(model, out, block, **plain)
            before = digest_of(trainer.model)
            trainer.train()
            moved.append(before != digest_of(trainer.model))
    untested = [str(warning.message) for warning in told if warning.category is UntestedVersionWarning]
    return {"trl": trl.__file__, "untested": untested, "refused": refused, "moved": moved}
