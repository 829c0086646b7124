"""Sampling masks in what TRL's engine wrapper returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mismatch_ext.errors import RecordError
from mismatch_ext.sampling_mask import TokenSupport, support_of_top


@dataclass(frozen=True)
class EngineMasks:
    """Makes masks of the most likely tokens that an engine reports after truncation.

    Args:
        asked: How many it is asked for; the sampled token comes besides.
        vocabulary: Tokens that its logits are over, `asked` at least.
    """

    asked: int
    vocabulary: int

    def of(self, result: tuple[Any, ...]) -> tuple[list[TokenSupport], tuple[Any, ...]]:
        """Return the masks of each completion, and the result with the sampled tokens' log-probabilities alone.

        Args:
            result: Prompts, completions, and of each of their tokens the log-probabilities and ids of the most likely tokens
                and the sampled one.

        Raises:
            RecordError: A mask is not known; names completion and token.
        """
        prompts, completions, tops, ids = result
        if tops is None or ids is None:
            raise RecordError("the engine returned no log-probabilities, of which sampling masks are made.")
        supports, sampled = [], []
        for row, (tokens, values, names) in enumerate(zip(completions, tops, ids, strict=True)):
            found = support_of_top(names, values, asked=self.asked, vocabulary=self.vocabulary, name=str(row))
            supports.append(found)
            sampled.append([[top[of.index(token)]] for token, top, of in zip(tokens, values, names, strict=True)])
        return supports, (prompts, completions, sampled, [[[token] for token in tokens] for tokens in completions])
