"""The settings of a host's run, as the doctor takes them over: what each is, where it stands, and what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_ext.errors import ConfigError

# Responses are cut there unless --max-tokens says otherwise: the logits of all tokens are kept.
LONGEST = 128


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Where prompts come from.

    Args:
        paths: Files of one kind, or one name of a dataset.
        option: What named it, for messages.
        config: Of a dataset with several.
        split: Which rows.
        column: Of the prompts: texts, or lists of messages.
        template: Text of a chat template in the place of the tokenizer's own.
        template_arguments: What the host gives the chat template.
        longest: Most tokens of a prompt, longer ones are left out; None for any.
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
    """What a host's configuration says of a run.

    Args:
        sides: Its two sides: arguments of `adapters.doctor.Run`.
        max_tokens: Most tokens of a response, as the host has it.
        dataset: Where the host takes its prompts from; None where a script does.
        origin: Where each setting of the sides stands, by its name.
        left_out: Settings of the host that the doctor does not take over, and why.
    """

    sides: Mapping[str, Any]
    max_tokens: int
    dataset: Dataset | None
    origin: Mapping[str, str]
    left_out: Mapping[str, str]


def not_started(name: str, value: object, why: str, todo: str) -> ConfigError:
    """Return the error for a setting of the host under which the doctor would start another engine than the run's."""
    return ConfigError(f"{name}={value!r}: {why}; {todo}.")
