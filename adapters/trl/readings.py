"""Sampling settings, ratio bias and resumed step, as read off a TRL trainer and its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from mismatch_ext.errors import ConfigError
from mismatch_ext.rollout import SamplingSettings

# Keys of `generation_kwargs` that change the engine's distribution and leave the trainer's as it is.
ENGINE_ONLY = (
    "allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "logits_processors", "min_tokens",
    "presence_penalty", "structured_outputs",
)  # fmt: skip


def sampling_settings(source: Any, generation_kwargs: Mapping[str, Any] | None) -> SamplingSettings:
    """Return what a trainer's engine samples with; `generation_kwargs` come last, as in TRL.

    `source` is a trainer, its configuration or its engine wrapper: what has TRL's sampling arguments as attributes.
    """
    given = generation_kwargs or {}
    settings = {
        "temperature": source.temperature,
        "top_p": source.top_p,
        "top_k": source.top_k,
        "min_p": source.min_p or 0.0,
        "repetition_penalty": source.repetition_penalty,
    }
    settings.update({k: v for k, v in given.items() if k in settings})
    for key, value in (("logprobs", 0), ("n", 1)):
        if given.get(key, value) != value:
            raise ConfigError(
                f"generation_kwargs[{key!r}]={given[key]!r}: with more than one candidate per token or prompt, TRL takes the "
                f"most likely one's log-probability for the sampled one's; allowed: {value}. Remove it from generation_kwargs."
            )
    if settings["temperature"] != source.temperature:
        raise ConfigError(
            f"generation_kwargs['temperature']={settings['temperature']} but temperature={source.temperature}: the engine "
            "would sample at one temperature and the trainer score at the other; set temperature and remove it from "
            "generation_kwargs."
        )
    return SamplingSettings(**settings)


def ratio_bias(trainer: Any, sampling: SamplingSettings) -> str | None:
    """Say why the gap is not only numerics (truncated support, penalties, constrained decoding), or return None."""
    sentences = [sampling.ratio_bias()]
    if sampling.truncates_support and trainer.args.vllm_mode == "colocate":
        sentences.append(
            "mismatch.sampling_mask, where it is allowed, scores over the tokens that survive, with the ratio at 1."
        )
    keys = [key for key in ENGINE_ONLY if (trainer.args.generation_kwargs or {}).get(key)]
    keys += ["vllm_structured_outputs_regex"] if trainer.args.vllm_structured_outputs_regex else []
    if keys:
        sentences.append(
            f"{' and '.join(keys)} change the engine's distribution and not the trainer's: every ratio contains that "
            "change, and the gap is not numerics alone."
        )
    return " ".join(filter(None, sentences)) or None


def step_of_checkpoint(checkpoint: str | None) -> int | None:
    """Return the last step of a checkpoint; None without one."""
    state = Path(checkpoint or "") / "trainer_state.json"
    return TrainerState.load_from_json(str(state)).global_step if checkpoint and state.is_file() else None
