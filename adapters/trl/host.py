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
from mismatch_ext.errors import PrecisionError
from mismatch_ext.records import SamplingSettings


def sampling_settings(trainer: Any) -> SamplingSettings:
    """Return what a trainer's engine samples with; `generation_kwargs` come last, as in TRL."""
    settings = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
    }
    settings.update({k: v for k, v in (trainer.args.generation_kwargs or {}).items() if k in settings})
    return SamplingSettings(**settings)


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


class EngineRefusals(AbstractContextManager[None]):
    """Turn vLLM's refusal of a dtype into a `PrecisionError` that names the setting.

    Args:
        block: The block that asked for the dtype.
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
