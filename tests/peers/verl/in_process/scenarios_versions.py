"""Blocks on a verl that nobody has run, in an interpreter whose path begins with a copy of it."""

from __future__ import annotations

import warnings
from typing import Any

import verl
from hydra import compose, initialize_config_module
from mismatch_ext.adapters import compat
from mismatch_ext.adapters.verl import config as settings
from mismatch_ext.adapters.verl.behavior import check_weights

from mismatch_ext import versions
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, ReplayError, UntestedVersionWarning
from tests.peers.verl.in_process.losses import actor_config
from tests.peers.verl.in_process.scenarios_masks import supports, with_fields
from tests.peers.verl.in_process.workers import R2, batch, parameters, scored, update, worker

BLOCK: dict[str, Any] = {"routing": R2, "sampling_mask": {}}


def newer(model: str) -> dict[str, Any]:
    """Prepare a configuration, score and update over routes and masks, and return what was warned of and refused.

    Args:
        model: A mixture of experts.
    """
    found: dict[str, Any] = {"verl": verl.__file__, "refused": []}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UntestedVersionWarning)
        versions._TOLD.clear()  # verl has loaded the plugin, which was the first to warn
        _prepare()
        parsed = MismatchConfig.parse(BLOCK)
        assert parsed is not None
        compat.check(("verl",), parsed.features, {"verl", "fsdp"})  # as verl's worker does
        try:
            check_weights(actor_config())
        except ConfigError as error:
            found["refused"].append(str(error))
        try:
            built = worker(model, BLOCK, use_remove_padding=True)
            plain = batch()
            data = scored(
                built, with_fields(plain, supports(plain, int(built.engine.model_config.hf_config.vocab_size)))
            )
        except ReplayError as error:
            found["refused"].append(str(error))
        else:
            update(built, data)
            found["logprobs"] = [row.tolist() for row in data["old_log_probs"].unbind()]
            found["parameters"] = parameters(built)
    found["untested"] = [str(one.message) for one in told if one.category is UntestedVersionWarning]
    return found


def _prepare() -> None:
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        overrides = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm", "+mismatch.kl.coef=0.1"]
        settings.prepare(compose("ppo_trainer", overrides=overrides))
