"""Let the log-probabilities of verl's FSDP engine be computed by somebody else from its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mismatch_ext.patching import Patch, applied

Score = Callable[[Tensor, Tensor], Tensor]
"""Takes logits `[N, V]`, divided by the temperature, and the next tokens' ids `[N]`; returns log-probabilities `[N]`."""

_scores: list[Score] = []  # of the blocks that are open, the last one counts


def _make(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        if not _scores:
            return original(logits, labels, inplace_backward=inplace_backward)
        return _scores[-1](logits, labels)

    return logprobs_from_logits


def _probe(original: Callable[..., Tensor]) -> str | None:
    """Say what it returns instead of the log-probabilities of two tokens, or return None."""
    from verl.utils.device import get_device_name  # patches are declared without their peers

    device = get_device_name()
    logits, labels = (
        torch.tensor([[0.3, -1.0, 2.0], [0.5, 0.1, 0.0]], device=device),
        torch.tensor([2, 0], device=device),
    )
    expected = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    logprobs = original(logits.clone(), labels, inplace_backward=False)
    return None if torch.allclose(logprobs, expected, atol=1e-4) else f"it returned {logprobs}, not {expected}."


RESPONSE_LOGPROBS = Patch(
    name="verl/response_logprobs",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    target="verl.workers.engine.fsdp.transformer_impl:logprobs_from_logits",
    make=_make,
    probe=_probe,
    observed="a micro-batch of which no token came to it is refused",
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/engine/fsdp/transformer_impl.py",
    reason=(
        "verl's FSDP engine takes log-probabilities over the whole vocabulary in the middle of prepare_model_outputs, after the "
        "temperature and before sequences are put together again: sampling masks are replayed there."
    ),
    not_covered="Fused heads, which return no logits, and Megatron's and other engines; a pass without the call is refused.",
    remove_when="verl's engine takes the log-probabilities of a pass from a method that can be overridden, or replays masks.",
)


@contextmanager
def scoring_with(score: Score) -> Iterator[None]:
    """Take the log-probabilities of verl's FSDP engine from a function, within a `with` block.

    Args:
        score: Computes them; see `Score`.

    Raises:
        PatchError: verl's function is not what it was.
    """
    _scores.append(score)
    try:
        with applied(RESPONSE_LOGPROBS):
            yield
    finally:
        _scores.remove(score)
