"""Let the log-probabilities of verl's FSDP engine be computed by somebody else from its logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from mismatch_ext.patching import Given, Patch

Score = Callable[[Tensor, Tensor], Tensor]
"""Takes logits `[N, V]`, divided by the temperature, and the next tokens' ids `[N]`; returns log-probabilities `[N]`."""

_SCORES: Given[Score] = Given()
_TAKEN = ("logits", "labels", "inplace_backward")


def _make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        if (score := _SCORES.last) is None:
            return original(logits, labels, inplace_backward=inplace_backward)
        return score(logits, labels)

    return logprobs_from_logits


def _probe(original: Any) -> str | None:
    """Say why verl's engine does not take its log-probabilities from this function with these arguments, or return None."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    found = tuple(inspect.signature(original).parameters)
    if found != _TAKEN:
        return f"its parameters are {found}, not {_TAKEN}."
    called = "logprobs_from_logits(" in inspect.getsource(FSDPEngineWithLMHead.prepare_model_outputs)
    return None if called else "FSDPEngineWithLMHead.prepare_model_outputs no longer calls it."


RESPONSE_LOGPROBS = Patch(
    name="verl/response_logprobs",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    target="verl.workers.engine.fsdp.transformer_impl:logprobs_from_logits",
    binding_only=True,
    make=_make,
    probe=_probe,
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/engine/fsdp/transformer_impl.py",
    reason=(
        "verl's FSDP engine takes log-probabilities over the whole vocabulary in the middle of prepare_model_outputs, after the "
        "temperature and before sequences are put together again: sampling masks are replayed there."
    ),
    not_covered="Fused heads, which return no logits, and Megatron's and other engines; a pass without the call is refused.",
    remove_when="verl's engine takes the log-probabilities of a pass from a method that can be overridden, or replays masks.",
)


def scoring_with(score: Score) -> AbstractContextManager[None]:
    """Take the log-probabilities of verl's FSDP engine from a function, within a `with` block.

    Args:
        score: Computes them; see `Score`.

    Raises:
        PatchError: verl's function is not what it was.
    """
    return _SCORES.during(score, RESPONSE_LOGPROBS)
