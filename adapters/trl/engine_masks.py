"""Sampling masks in what TRL's engine wrapper returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_ext.patches.vllm.top_logprobs import SampledLogprobs, top_logprobs

from mismatch_ext.errors import RecordError
from mismatch_ext.patching import Patch
from mismatch_ext.sampling_mask import LeftTokens, TokenSupport


@dataclass(frozen=True)
class EngineMasks:
    """Makes masks of the most likely tokens that an engine reports after truncation.

    Args:
        asked: How many tokens the engine is asked for; it returns the sampled token in addition.
        vocabulary: How many tokens the engine's logits are over, at least `asked`.
    """

    asked: int
    vocabulary: int

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Patches that keep these tokens as numbers while the engine generates; none where each token has to be an object."""
        return top_logprobs()

    def of(self, result: tuple[Any, ...], outputs: Sequence[Any] | None) -> tuple[list[TokenSupport], tuple[Any, ...]]:
        """Return the masks of each completion, and the result with only the sampled tokens' log-probabilities.

        `outputs` is what the engine returned while `patches` were in place; None where there are none.
        """
        prompts, completions, tops, ids = result
        if tops is None or ids is None:
            raise RecordError("the engine returned no log-probabilities, of which sampling masks are made.")
        kept = _kept(outputs or ())
        if kept or (outputs is not None and not outputs):
            return [self._of_completion(row, tokens, kept) for row, tokens in enumerate(completions)], result
        supports, sampled = [], []
        for row, (tokens, values, names) in enumerate(zip(completions, tops, ids, strict=True)):
            found = TokenSupport.from_top(names, values, asked=self.asked, vocabulary=self.vocabulary, name=str(row))
            supports.append(found)
            sampled.append([[top[of.index(token)]] for token, top, of in zip(tokens, values, names, strict=True)])
        return supports, (prompts, completions, sampled, [[[token] for token in tokens] for tokens in completions])

    def _of_completion(self, row: int, tokens: Any, kept: dict[int, LeftTokens]) -> TokenSupport:
        if not tokens:
            return TokenSupport.empty(0, self.vocabulary)
        if (left := kept.get(id(tokens))) is None:
            raise RecordError(
                f"rollout {row}: its tokens are not those of an output of LLM.generate: something stands between the engine and "
                "TRL, so that its sampling masks are not known. Remove it, or mismatch.sampling_mask."
            )
        return left.support(asked=self.asked, vocabulary=self.vocabulary, name=str(row))


def _kept(outputs: Sequence[Any]) -> dict[int, LeftTokens]:
    """Return what outputs have kept as numbers, by the identity of the token list that TRL hands on.

    With tensor parallelism every rank has the outputs of all ranks, and TRL takes the rank's own.
    """
    rows = [row for output in outputs for row in output.outputs]
    return {id(row.token_ids): row.logprobs.left for row in rows if isinstance(row.logprobs, SampledLogprobs)}
