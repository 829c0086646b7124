"""What score centering costs: bytes per token, and the processor time of the output head and its loss, forward and backward.

    python -m benchmarks centering

A head of SmolLM2-135M's size (576 by 49,152, float32) over 128 tokens, through TRL's fused head as its loss calls it, with and
without the term of 128 tokens at each place. The rest of a step, which is the same in both, is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.centering import TokenHead, projected_terms

TOKENS, HIDDEN, VOCABULARY, TOP_K, REPEATS = 128, 576, 49_152, 128, 3


def seconds(work: Callable[[], Tensor], leaves: list[Tensor]) -> float:
    """Return the processor time of a loss and its gradient."""
    for leaf in leaves:
        leaf.grad = None
    begun = time.process_time()
    work().backward()
    return time.process_time() - begun


def run() -> list[dict[str, Any]]:
    """Return one row: bytes per token, and seconds per 1,000 tokens without and with centering."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draws).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=draws) / HIDDEN**0.5).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=draws)
    with torch.no_grad():
        sampler = (hidden @ weight.T + 0.1 * torch.randn(TOKENS, VOCABULARY, generator=draws)).log_softmax(-1)
        logprobs, ids = sampler.topk(TOP_K, dim=-1)
    head = TokenHead(ids=ids.int(), logprobs=logprobs)

    def without() -> Tensor:
        found = _ChunkedLogProbFunction.apply(
            hidden, weight, None, labels, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",)
        )
        return -found[0].mean()

    def centered() -> Tensor:
        terms, _ = projected_terms(hidden, weight, None, head_ids=head.ids.long(), head_logprobs=head.logprobs)
        return without() + terms.mean()

    times = []
    for _ in range(REPEATS + 1):
        times.append([seconds(work, [hidden, weight]) for work in (without, centered)])
    # The first of each compiles TRL's head.
    plain, full = (median(column) * 1000 / TOKENS for column in zip(*times[1:], strict=True))
    return [
        {
            "name": f"score centering, output head of {HIDDEN} x {VOCABULARY}, top_k {TOP_K}",
            "bytes per token": (head.ids.nbytes + head.logprobs.nbytes) / TOKENS,
            "without, s per 1,000 tokens": plain,
            "with, s per 1,000 tokens": full,
            "times": full / plain,
        }
    ]
