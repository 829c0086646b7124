"""The settings of a host's run that the doctor uses: their values, where each comes from, and which are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_ext.errors import ConfigError

# Why an attention implementation of a host's run is left out.
OTHER_KERNELS = (
    "the doctor's trainer takes an attention of transformers that computes the same in float32, without its kernels"
)
# Responses are cut at this length unless --max-tokens says otherwise, because the logits of all tokens are kept.
LONGEST = 128
# Responses that are sampled unless --responses says otherwise.
RESPONSES = 256


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Where prompts come from.

    Args:
        paths: Files of one kind, or the name of one dataset.
        option: The option that named it, for messages.
        config: Name of the dataset's configuration, if it has several.
        split: The split to read.
        column: The column of the prompts: texts, or lists of messages.
        template: Text of a chat template that replaces the tokenizer's own.
        template_arguments: Arguments that the host passes to the chat template.
        longest: Prompts with more tokens than this are left out; None for no limit.
    """

    paths: tuple[str, ...]
    option: str = "--dataset"
    config: str | None = None
    split: str = "train"
    column: str = "prompt"
    template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostRun:
    """What a host's configuration says about a run.

    Args:
        sides: Its two sides: arguments of `adapters.doctor.Run`.
        max_tokens: The host's limit on the tokens of a response.
        dataset: Where the host takes its prompts from; None if a script supplies them.
        origin: For each setting of the sides, by name, where it was found.
        left_out: Settings of the host that the doctor does not use, and why.
    """

    sides: Mapping[str, Any]
    max_tokens: int
    dataset: Dataset | None
    origin: Mapping[str, str]
    left_out: Mapping[str, str]


def not_started(name: str, value: object, why: str, todo: str) -> ConfigError:
    """Return the error for a host setting that the doctor cannot reproduce, so that its engine would differ from the run's."""
    return ConfigError(f"{name}={value!r}: {why}; {todo}.")
