"""What is read off a TRL trainer and its checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, PrecisionError, RoutingError
from mismatch_ext.records import SamplingSettings

# Keys of `generation_kwargs` that change the engine's distribution and leave the trainer's as it is.
ENGINE_ONLY = (
    "allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "logits_processors", "min_tokens",
    "presence_penalty", "structured_outputs",
)  # fmt: skip


def sampling_settings(trainer: Any) -> SamplingSettings:
    """Return what a trainer's engine samples with; `generation_kwargs` come last, as in TRL.

    Raises:
        ConfigError: `generation_kwargs` gives the engine another temperature than the trainer scores with, or asks for
            more than the sampled tokens' log-probabilities.
    """
    settings = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
    }
    settings.update({k: v for k, v in (trainer.args.generation_kwargs or {}).items() if k in settings})
    for key, value in (("logprobs", 0), ("n", 1)):
        given = (trainer.args.generation_kwargs or {}).get(key, value)
        if given != value:
            raise ConfigError(
                f"generation_kwargs[{key!r}]={given!r}: with more than one candidate per token or prompt, TRL takes the most "
                f"likely one's log-probability for the sampled one's; allowed: {value}. Remove it from generation_kwargs."
            )
    if settings["temperature"] != trainer.temperature:
        raise ConfigError(
            f"generation_kwargs['temperature']={settings['temperature']} but temperature={trainer.temperature}: the engine "
            "would sample at one temperature and the trainer score at the other; set temperature and remove it from "
            "generation_kwargs."
        )
    return SamplingSettings(**settings)


def ratio_bias(trainer: Any, sampling: SamplingSettings) -> str | None:
    """Say why the gap is not numerics alone, or return None: truncated support, penalties, constrained decoding."""
    sentences = [sampling.ratio_bias()]
    keys = [key for key in ENGINE_ONLY if (trainer.args.generation_kwargs or {}).get(key)]
    keys += ["vllm_structured_outputs_regex"] if trainer.args.vllm_structured_outputs_regex else []
    if keys:
        sentences.append(
            f"{' and '.join(keys)} change the engine's distribution and not the trainer's: every ratio contains that "
            "change, and the gap is not numerics alone."
        )
    return " ".join(filter(None, sentences)) or None


def plain_vocabulary(tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Tensor:
    """Return the token ids `[V]` that have text and no special meaning."""
    special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    return torch.tensor(sorted(set(range(len(tokenizer))) - special), device=device)


def step_of_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> int | None:
    """Return the last step of the checkpoint that a run resumes, or None for a new run.

    Args:
        resume_from_checkpoint: As `Trainer.train` takes it: a path, or True for the last one in the output folder.
        output_dir: The trainer's output folder.
    """
    checkpoint = get_last_checkpoint(output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
    state = Path(checkpoint or "") / "trainer_state.json"
    return TrainerState.load_from_json(str(state)).global_step if checkpoint and state.is_file() else None


def check_objective(trainer: type[Any], block: MismatchConfig) -> None:
    """Refuse what changes the objective under a trainer of TRL whose own loss would ignore it.

    Raises:
        ConfigError: `kl` or `correction` with GMPOTrainer, which multiplies its loss by no importance ratio.
    """
    for name in ("kl", "correction"):
        # By name: importing TRL's experimental trainers warns.
        if getattr(block, name) is not None and "GMPOTrainer" in (kind.__name__ for kind in trainer.__mro__):
            raise ConfigError(
                f"mismatch.{name} with {trainer.__name__}: GMPOTrainer's loss has no seam for it; allowed: precision, routing, "
                "lr and monitor. Remove it, or use MismatchGRPOTrainer."
            )


class EngineRefusals(AbstractContextManager[None]):
    """Turn vLLM's refusal of what a block asked for into an error that names the setting.

    Args:
        block: The block.
    """

    def __init__(self, block: MismatchConfig) -> None:
        self.block = block

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        dtype = self.block.precision.dtype if self.block.precision is not None else None
        if isinstance(error, ValueError) and dtype is not None and dtype in str(error):
            raise PrecisionError(
                f"mismatch.precision.dtype={dtype!r}: vLLM refuses to run this model in it: {error} "
                "Choose a dtype that both sides support."
            ) from error
        if isinstance(error, ValueError) and self.block.routing is not None and "outed-experts" in str(error):
            raise RoutingError(
                f"mismatch.routing.mode={self.block.routing.mode!r}: vLLM refuses to record this model's routing: {error} "
                "Remove mismatch.routing if the model is not a mixture of experts."
            ) from error
