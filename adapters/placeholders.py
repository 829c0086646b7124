"""Tokens that stand for an image, a video or a sound: without what they stand for, a model reads them as if they were text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mismatch_ext.errors import RecordError

KEYS = tuple(f"{medium}_token_{kind}" for medium in ("image", "video", "audio") for kind in ("id", "index"))
"""What configurations of transformers call the token ids that a processor puts in the place of a medium."""


def placeholders_of(config: Mapping[str, Any]) -> dict[int, str]:
    """Return the placeholders of a model: token id to the key of its configuration that names it.

    Args:
        config: The contents of a checkpoint's `config.json`.
    """
    return {config[key]: key for key in KEYS if isinstance(config.get(key), int)}


def placeholders_at(model: object) -> dict[int, str]:
    """Return the placeholders of a checkpoint in a folder; none of what is no folder, as a name on a hub.

    Args:
        model: Path of the checkpoint.
    """
    file = Path(model) / "config.json" if isinstance(model, str) else None
    if file is None or not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    return placeholders_of(config) if isinstance(config, dict) else {}


def refuse_placeholders(prompts: Sequence[Sequence[int]], known: Mapping[int, str], where: str) -> None:
    """Refuse prompts of token ids that stand for a medium which is not sent with them.

    Args:
        prompts: Token ids of each.
        known: What `placeholders_of` returned.
        where: Who would be asked, for the message.

    Raises:
        RecordError: Names the prompt, the position, the id and what it stands for.
    """
    for number, prompt in enumerate(prompts if known else ()):
        for place, token in enumerate(prompt):
            if token in known:
                raise RecordError(
                    f"prompt {number}, position {place}: token id {token} is {known[token]} of {where}, and stands for something "
                    "that is not sent with it; the engine would answer as if it were a word. Allowed: prompts of text alone."
                )
