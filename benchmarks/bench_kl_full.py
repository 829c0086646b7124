"""Time and peak memory of the chunked exact KL over the vocabulary against its plain form, forward and backward."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import peak
from mismatch_ext.kl import kl_full

TOKENS, VOCABULARY, REPEATS = 2048, 152_000, 2


def naive(logits: Tensor, reference: Tensor) -> Tensor:
    """Return the KL as it is usually written, with autograd."""
    policy, other = logits.float().log_softmax(-1), reference.float().log_softmax(-1)
    return (policy.exp() * (policy - other)).sum(-1)


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ours": lambda logits, reference: kl_full(logits=logits, ref_logits=reference),
    "naive": naive,
}


def measure(form: str) -> dict[str, Any]:
    """Run one form in this process, which must be fresh: peak memory is that of the process.

    Returns:
        Seconds of forward and backward, peak memory beyond the inputs in units of one float32 tensor `[tokens, V]`, and the
        sums that the forms are compared by.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator)
    reference = torch.randn(TOKENS, VOCABULARY, generator=generator).mul_(0.3).add_(logits)
    logits.requires_grad_()
    before = peak()
    start = time.perf_counter()
    kl = FORMS[form](logits, reference)
    kl.sum().backward()
    seconds = time.perf_counter() - start
    beyond = (peak() - before) * 2**20 / (TOKENS * VOCABULARY * 4)
    assert logits.grad is not None
    probe = logits.grad[:64].double()
    return {
        "seconds": seconds,
        "peak": beyond,
        "kl": float(kl.detach().double().sum()),
        "gradient": float(probe.square().sum()),
    }


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark; each measurement in a process of its own, in turn."""
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "naive": []}
    for _ in range(REPEATS):
        for form in found:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.bench_kl_full", form], capture_output=True, text=True, check=True
            )
            found[form].append(json.loads(done.stdout))
    for ours, theirs in zip(found["ours"], found["naive"], strict=True):
        for name in ("kl", "gradient"):
            assert abs(ours[name] / theirs[name] - 1) < 1e-4, (name, ours, theirs)
    what = f"exact KL of [{TOKENS}, {VOCABULARY}] float32 logits, forward and backward, vs log_softmax of both"
    rows = []
    for name, key in (("time", "seconds"), ("peak memory in [tokens, V] float32 tensors", "peak")):
        pairs = [(a[key], b[key]) for a, b in zip(found["ours"], found["naive"], strict=True)]
        rows.append(
            {
                "name": f"{what}: {name}",
                "ours": median(a for a, _ in pairs),
                "theirs": median(b for _, b in pairs),
                "ratio": median(b / a for a, b in pairs),
                "equal": "sum of the KL, and squared norm of the gradient of 64 tokens, to 1e-4 relative",
            }
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
