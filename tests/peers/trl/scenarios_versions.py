"""Blocks on a TRL that nobody has run, in an interpreter whose path begins with a copy of it."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import trl
from mismatch_ext.adapters.trl import MismatchRLOOConfig, MismatchRLOOTrainer, attach
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import SeamError, UntestedVersionWarning
from tests.peers.trl.scenarios_attach import eager
from tests.peers.trl.scenarios_training import arguments, build, digest_of, graded, rows

WITH_ENGINE: tuple[dict[str, Any], ...] = (
    {"kl": {"coef": 0.1}, "correction": {"preset": "decoupled_token_is"}},
    {"routing": {"mode": "R3"}},
    {"sampling_mask": {}},
    {"precision": {"dtype": "float32"}, "lr": {}},
)


class Reached(Exception):
    """TRL has come to start its engine: nothing was refused."""


def newer(model: str, out: str, engine: bool) -> dict[str, Any]:
    """Construct a trainer with each section, train two of them a step, and return what was warned of and refused.

    Args:
        model: A mixture of experts.
        out: Where runs go.
        engine: Whether to train with a vLLM engine too, with a block and by `attach`.
    """
    plain = {"use_vllm": False, "max_steps": 1, "bf16": False, "per_device_train_batch_size": 4}
    refused, moved = [], []

    def trained(trainer: Any) -> bool:
        before = digest_of(trainer.model)
        trainer.train()
        return before != digest_of(trainer.model)

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
        for block in (
            {"kl": {"coef": 0.1}},
            {"kl": {"coef": 0.1, "reward_path": "rewards"}},
            {"routing": {"mode": "R2"}},
        ):
            try:
                moved.append(trained(build(model, out, block, **plain, save_strategy="steps", save_steps=1)))
            except SeamError as error:
                refused.append(str(error))
        given = {**arguments(f"{out}/rloo", **plain), "mismatch": {"routing": {"mode": "R2"}}}
        given.pop("vllm_importance_sampling_mode")
        moved.append(
            trained(
                MismatchRLOOTrainer(
                    model=model, reward_funcs=graded, args=MismatchRLOOConfig(**given), train_dataset=rows()
                )
            )
        )
        if engine:
            moved.append(
                trained(
                    build(model, out, {**WITH_ENGINE[0], "precision": {"dtype": "float32"}}, max_steps=1, bf16=None)
                )
            )
            args = GRPOConfig(**arguments(f"{out}/attached", max_steps=1))
            with eager():
                stock = GRPOTrainer(model=model, reward_funcs=graded, args=args, train_dataset=rows())
            measured = attach(stock)
            moved.append(trained(stock) and measured.verdict is not None and measured.verdict.ok)
    untested = [str(warning.message) for warning in told if warning.category is UntestedVersionWarning]
    return {"trl": trl.__file__, "untested": untested, "refused": refused, "moved": moved}


def added(model: str, out: str) -> dict[str, Any]:
    """Train a step with a section inside of TRL's loss and one outside; return what was said of the loss and what was refused."""
    found: dict[str, Any] = {"trl": trl.__file__}
    for name, block in {"kl": {"kl": {"coef": 0.1}}, "lr": {"lr": {}}}.items():
        refused, moved = None, False
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                trainer = build(model, f"{out}/{name}", block, use_vllm=False, max_steps=1, bf16=False)
                before = digest_of(trainer.model)
                trainer.train()
                moved = before != digest_of(trainer.model)
            except SeamError as error:
                refused = str(error)
        said = [str(warning.message) for warning in told if "The loss of trl" in str(warning.message)]
        found[name] = {"trained": moved, "refused": refused, "told": said}
    return found
