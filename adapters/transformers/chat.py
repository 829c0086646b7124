"""A tokenizer of transformers with its chat template, as `mismatch_ext.chains` asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mismatch_ext.chains.turns import Message
from mismatch_ext.errors import ConfigError, RecordError


class TokenizerChat:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        # A tokenizer may have several templates by name, of which "default" is rendered.
        self.template = str(template.get("default", "") if isinstance(template, dict) else template or "")
        added = (token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special)
        self.special_ids = frozenset({*tokenizer.all_special_ids, *added})

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        **settings: Any,
    ) -> str:
        """Return the text of messages; raises RecordError if the template refuses them."""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                chat_template=template,
                tokenize=False,
                **settings,
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordError(f"the chat template cannot render the messages: {error}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered text, without adding special tokens; raises RecordError if it has none."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:
            raise RecordError(f"the tokenizer cannot encode a text: {error}. Give the run's own tokenizer.") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def load_chat(folder: Path, template: Path | None = None) -> TokenizerChat:
    """Return the tokenizer in a checkpoint's folder, with another chat template from a file if one is given.

    Raises:
        ConfigError: The folder has no tokenizer, there is no chat template, or the file cannot be read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} has no tokenizer that can be read: {str(error).splitlines()[0]}") from error
    if template is not None:
        try:
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template: {template} cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {folder} has no chat template. Give the run's by --chat-template.")
    return TokenizerChat(tokenizer)
