"""Blocks on a TRL that nobody has run, in an interpreter whose path begins with a copy of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import trl
from mismatch_ext.adapters.trl import attach
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import UntestedVersionWarning
from tests.peers.trl.scenarios_attach import eager
from tests.peers.trl.scenarios_training import arguments, build, digest_of, graded, rows

OWN = {"use_vllm": False, "max_steps": 1, "bf16": False, "per_device_train_batch_size": 4}


class Reached(Exception):
    """TRL has come to start its engine: nothing was refused."""


@contextmanager
def moving(trainer: Any) -> Iterator[None]:
    """Check that the weights move meanwhile."""
    before = digest_of(trainer.model)
    yield
    assert digest_of(trainer.model) != before


def newer(model: str, out: str, copy: str) -> None:
    """Build a trainer with each section, and train with the engine by a block and by `attach`, under one warning.

    Args:
        model: A mixture of experts.
        out: Where runs go.
        copy: Where TRL has to come from.
    """
    assert trl.__file__.startswith(copy)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UntestedVersionWarning)
        for block in ({"routing": {"mode": "R3"}}, {"sampling_mask": {}}):
            with mock.patch("vllm.LLM.__init__", side_effect=Reached), pytest.raises(Reached):
                build(model, out, block, top_k=8)
        for block in ({"kl": {"coef": 0.1, "reward_path": "rewards"}}, {"routing": {"mode": "R2"}}):
            trainer = build(model, out, block, **OWN, save_strategy="steps", save_steps=1)
            with moving(trainer):
                trainer.train()
        block = {
            "kl": {"coef": 0.1}, "correction": {"preset": "decoupled_token_is"}, "precision": {"dtype": "float32"}, "lr": {},
        }  # fmt: skip
        trainer = build(model, out, block, max_steps=1, bf16=None)
        with moving(trainer):
            trainer.train()
        with eager():
            args = GRPOConfig(**arguments(f"{out}/attached", max_steps=1))
            stock = GRPOTrainer(model=model, reward_funcs=graded, args=args, train_dataset=rows())
        measured = attach(stock)
        with moving(stock):
            stock.train()
        assert measured.verdict.ok
    (untested,) = [str(warning.message) for warning in told if warning.category is UntestedVersionWarning]
    assert "trl 1.18.2" in untested


def added(model: str, out: str, copy: str) -> None:
    """Train with a section inside of TRL's loss, of which a warning tells what is new there, and with one outside."""
    assert trl.__file__.startswith(copy)
    for name, block in {"kl": {"kl": {"coef": 0.1}}, "lr": {"lr": {}}}.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer = build(model, f"{out}/{name}", block, **OWN)
            with moving(trainer):
                trainer.train()
        said = [str(warning.message) for warning in told if "The loss of trl" in str(warning.message)]
        assert ["inputs['top_p_ratio']" in text for text in said] == ([True] if name == "kl" else []), said
