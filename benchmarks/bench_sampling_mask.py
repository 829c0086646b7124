"""What sampling masks cost in TRL's fused output projection."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch

from benchmarks.harness import peak
from mismatch_ext.sampling_mask import TokenSupport, head_logprobs, support_logprobs

TOKENS, HIDDEN, VOCABULARY, REPEATS = 256, 512, 152_000, 2
# A peak that no allocation has raised reads 0; it is at most a page, 1/256 MiB.
LEAST = 2.0**-8
WIDTHS = (8, 64)
"""Number of tokens that truncation left."""


def measure(width: int) -> dict[str, Any]:
    """Score tokens in this process, which must be fresh: peak memory is that of the process.

    Args:
        width: Tokens of each mask; 0 replays none.

    Returns:
        Seconds of forward and backward, peak memory beyond the inputs in MiB, and the largest difference of 16 tokens'
        log-probabilities from those of their logits.
    """
    # The fused head calls it by this module attribute, which the patch replaces.
    import trl.trainer.utils as head
    from mismatch_ext.patches.trl.fused_head import scoring_with

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul_(HIDDEN**-0.5).requires_grad_()
    ids = torch.randint(VOCABULARY // max(width, 1), (TOKENS, width), generator=generator)
    ids += torch.arange(width) * (VOCABULARY // max(width, 1))
    tokens = ids[:, 0].clone() if width else torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    support = TokenSupport.from_lists(ids.tolist(), VOCABULARY) if width else None

    def score(hidden: Any, weight: Any, bias: Any, labels: Any, **scaling: Any) -> Any:
        return head_logprobs(hidden, weight, bias, labels, support, **scaling) if support is not None else None

    before = peak()
    start = time.process_time()
    with scoring_with(score, entropies=True) if width else nullcontext():
        logprobs, *_ = head._ChunkedLogProbFunction.apply(
            hidden, weight, None, tokens, 1.0, head._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy")
        )
    logprobs.sum().backward()
    seconds = time.process_time() - start
    beyond = peak() - before
    with torch.no_grad():
        logits = hidden[:16] @ weight.T
        exact = logits.log_softmax(-1).gather(-1, tokens[:16, None])[:, 0]
        if support is not None:
            exact = support_logprobs(logits, tokens[:16], support.slice(0, 16))
    return {"seconds": seconds, "peak": beyond, "error": float((logprobs[:16].detach() - exact).abs().max())}


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark; each measurement in a process of its own, in turn."""
    found: dict[int, list[dict[str, Any]]] = {width: [] for width in (0, *WIDTHS)}
    for _ in range(REPEATS):
        for width, measured in found.items():
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.bench_sampling_mask", str(width)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            measured.append(json.loads(done.stdout.splitlines()[-1]))
    assert all(one["error"] < 1e-4 for measured in found.values() for one in measured), found
    rows = []
    for width in WIDTHS:
        for name, key in (("processor time", "seconds"), ("peak memory beyond the inputs, MiB", "peak")):
            pairs = [(ours[key], theirs[key]) for ours, theirs in zip(found[width], found[0], strict=True)]
            rows.append(
                {
                    "name": f"TRL's fused head, [{TOKENS}, {HIDDEN}] to {VOCABULARY}, forward and backward: masks of {width} "
                    f"tokens vs none: {name}",
                    "ours": median(a for a, _ in pairs),
                    "theirs": median(b for _, b in pairs),
                    "ratio": median(max(b, LEAST) / max(a, LEAST) for a, b in pairs),
                    "equal": "log-probabilities of 16 tokens and those of their logits, to 1e-4",
                }
            )
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
