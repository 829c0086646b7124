"""verl's configuration as a test gives it, and as the block leaves it."""

from __future__ import annotations

from mismatch_ext.adapters.verl import config as settings
from mismatch_ext.adapters.verl import plugin
from omegaconf import DictConfig

from tests.peers.verl.composed import composed

# Importing the adapter has loaded it: every process that collects a file of these tests would keep its patches.
plugin.unload()

GRPO = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.ref.strategy=fsdp2",
    "actor_rollout_ref.rollout.name=vllm",
)
MEGATRON = ("model_engine=megatron", "actor_rollout_ref.model.use_remove_padding=True")


def configured(*overrides: str) -> DictConfig:
    """Return verl's default configuration for GRPO with FSDP2 and vLLM, with overrides."""
    return composed(*GRPO, *overrides)


def prepared(*overrides: str) -> DictConfig:
    config = configured(*overrides)
    settings.prepare(config)
    return config


def prepared_megatron(*overrides: str) -> DictConfig:
    plain = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm")
    config = composed(*plain, *MEGATRON, *overrides)
    settings.prepare(config)
    return config
