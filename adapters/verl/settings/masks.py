"""Sampling masks in verl's configuration: sets vLLM's limit for them, and refuses settings under which masks cannot work."""

from __future__ import annotations

from mismatch_ext.adapters.verl.settings.refusals import FSDP, LOOPS, derives, refuse_first
from omegaconf import DictConfig, OmegaConf

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.rollout import SamplingSettings

PROCESSED = "processed_logprobs"
"""Mode in which vLLM returns log-probabilities after truncation."""


def set_masks(config: DictConfig, block: MismatchConfig) -> None:
    """Let vLLM report as many of its most likely tokens as the masks need, and our agent loops join them to rollouts.

    Args:
        config: All of verl's configuration; changed in place.
        block: The parsed block.

    Raises:
        ConfigError: A setting is refused; the message names it, its value, why, and what is allowed.
    """
    if block.sampling_mask is None:
        return
    group = config.actor_rollout_ref
    rollout, engine = group.rollout, group.rollout.engine_kwargs
    given = dict(engine.get("vllm") or {})
    mode = given.get("logprobs_mode") or rollout.get("logprobs_mode")
    manager = OmegaConf.select(rollout, "agent.agent_loop_manager_class")
    fused, drafts = bool(group.model.get("use_fused_kernels")), bool(OmegaConf.select(rollout, "mtp.enable_rollout"))
    refuse_first(
        _refused,
        (
            "actor_rollout_ref.rollout.name", rollout.name, rollout.name != "vllm", "'vllm'",
            "SGLang reports probabilities among all tokens, also of those that it has cut off",
        ),
        (
            "actor_rollout_ref.actor.strategy", group.actor.strategy, group.actor.strategy not in FSDP, "'fsdp' or 'fsdp2'",
            "its engine takes log-probabilities from shards of the vocabulary, where masks are not replayed",
        ),
        (
            "actor_rollout_ref.model.use_fused_kernels", fused, fused, "False",
            "a fused head returns log-probabilities over the whole vocabulary, and no logits",
        ),
        (
            "actor_rollout_ref.rollout.logprobs_mode", mode, mode != PROCESSED, repr(PROCESSED),
            "masks are read off what truncation has left",
        ),
        (
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class", manager,
            manager is not None and not derives(manager, LOOPS), f"{LOOPS!r}, or a class derived from it",
            "masks are joined to rollouts in this package's",
        ),
        ("actor_rollout_ref.rollout.mtp.enable_rollout", drafts, drafts, "False", "masks of drafted tokens were not run"),
    )  # fmt: skip
    if manager is None:
        OmegaConf.update(rollout, "agent.agent_loop_manager_class", LOOPS, force_add=True)
    asked = block.sampling_mask.asked(_sampling(rollout))
    engine.vllm = OmegaConf.merge(given, {"max_logprobs": _most(given.get("max_logprobs"), asked)})


def _refused(setting: str, value: object, allowed: str, why: str) -> ConfigError:
    return ConfigError(f"mismatch.sampling_mask with {setting}={value!r}: {why}; allowed: {allowed}.")


def _sampling(rollout: DictConfig) -> SamplingSettings:
    return SamplingSettings(
        temperature=float(rollout.temperature), top_p=float(rollout.top_p), top_k=max(int(rollout.top_k), 0)
    )


def _most(given: int | None, asked: int) -> int:
    """Return the limit to give vLLM: at least as many tokens as asked for; -1 stands for the whole vocabulary."""
    return given if given is not None and (given == -1 or given >= asked) else asked
