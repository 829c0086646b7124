"""The task's character tokenizer: two special tokens and one token per character, no chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.arithmetic.task import CHARACTERS

PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
VOCABULARY = {token: i for i, token in enumerate([PAD_TOKEN, EOS_TOKEN, *CHARACTERS])}
PAD_ID, EOS_ID = VOCABULARY[PAD_TOKEN], VOCABULARY[EOS_TOKEN]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; a character outside the task's alphabet raises, it does not become padding."""
    backend = Tokenizer(models.WordLevel(VOCABULARY))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def encode(text: str) -> list[int]:
    """Encode without the tokenizer object, for the training loop's inner path."""
    return [VOCABULARY[character] for character in text]
