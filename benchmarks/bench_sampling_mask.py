"""What sampling masks cost: in TRL's fused output projection, and in reading an engine's answers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import peak
from mismatch_ext.sampling_mask import TokenSupport, head_logprobs, support_logprobs

TOKENS, HIDDEN, VOCABULARY, REPEATS = 256, 512, 152_000, 2
ANSWERS, LENGTH, ANSWER_VOCABULARY = 8, 96, 4096
ASKED = (24, 136)
"""Number of most likely tokens that an engine is asked for, with top_k 8 and with top_k 64."""
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
    with scoring_with(score) if width else nullcontext():
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


def answers(asked: int, generator: np.random.Generator) -> list[Any]:
    """Return what an engine reports for each step: 8 tokens are left, one of them sampled, and all others are cut off."""
    from vllm.v1.outputs import LogprobsLists

    steps, rows = [], np.arange(ANSWERS)
    for _ in range(LENGTH):
        ids = np.stack([generator.permutation(ANSWER_VOCABULARY)[:asked] for _ in rows]).astype(np.int32)
        logprobs = np.full(ids.shape, -np.inf, np.float32)
        logprobs[:, :8] = np.log(np.arange(8, 0, -1) / 36)
        sampled = generator.integers(8, size=ANSWERS)
        columns = (np.concatenate([one[rows, sampled][:, None], one], 1) for one in (ids, logprobs))
        steps.append(LogprobsLists(*columns, sampled + 1))
    return steps


def read(steps: list[Any], asked: int, kept: bool) -> tuple[float, Any]:
    """Read answers as vLLM's output processing, TRL and our masks do.

    Args:
        steps: The answers.
        asked: Number of most likely tokens at each position.
        kept: Whether they are kept as numbers.

    Returns:
        Seconds of the processor, and masks and log-probabilities.
    """
    from mismatch_ext.adapters.trl.engine_masks import EngineMasks
    from mismatch_ext.patches.vllm.top_logprobs import TOP_LOGPROBS
    from trl.generation.vllm_generation import extract_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from benchmarks.stability.real_run import tokenizer
    from mismatch_ext.patching import applied

    decoder: Any = tokenizer(ANSWER_VOCABULARY)
    rest: dict[str, Any] = {"prompt_logprobs": None, "num_prompt_logprobs": None, "cumulative_logprob": 0.0}
    readers = [LogprobsProcessor(tokenizer=decoder, logprobs=[], num_logprobs=asked, **rest) for _ in range(ANSWERS)]
    with applied(*([TOP_LOGPROBS] if kept else [])):
        start = time.process_time()
        for step in steps:
            for row, reader in enumerate(readers):
                reader._update_sample_logprobs(step.slice_request(row, 1))
    tokens = [[int(step.logprob_token_ids[row, 0]) for step in steps] for row in range(ANSWERS)]
    outputs: list[Any] = [
        SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=reader.logprobs)])
        for ids, reader in zip(tokens, readers, strict=True)
    ]
    result = ([[1]] * ANSWERS, tokens, *extract_logprobs(outputs))
    supports, (_, _, *sampled) = EngineMasks(asked, ANSWER_VOCABULARY).of(result, outputs if kept else None)
    return time.process_time() - start, ([(one.ids.tolist(), one.offsets.tolist()) for one in supports], sampled)


def reading(asked: int) -> list[dict[str, Any]]:
    """Return the rows about reading this many most likely tokens per position: processor time and peak memory."""
    steps = answers(asked, np.random.default_rng(0))
    found = {kept: [read(steps, asked, kept) for _ in range(REPEATS + 3)][1:] for kept in (True, False)}
    assert found[True][0][1] == found[False][0][1], "other masks or log-probabilities"
    pairs = [(a, b) for (a, _), (b, _) in zip(found[True], found[False], strict=True)]
    peaks = []
    for kept in (True, False):
        tracemalloc.start()
        read(steps, asked, kept)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    name = f"reading {asked} most likely tokens for each of {ANSWERS * LENGTH} sampled ones: as numbers vs as objects"
    return [
        {
            "name": f"{name}: {what}",
            "ours": median(a for a, _ in values) / (ANSWERS * LENGTH),
            "theirs": median(b for _, b in values) / (ANSWERS * LENGTH),
            "ratio": median(b / a for a, b in values),
            "equal": "masks and log-probabilities bit for bit",
        }
        for what, values in (
            ("processor seconds each", pairs),
            ("most memory that Python allocates, bytes each", [tuple(peaks)]),
        )
    ]


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
    return rows + [row for asked in ASKED for row in reading(asked)]


if __name__ == "__main__":
    if sys.argv[1:] == ["reading"]:
        for row in (row for asked in ASKED for row in reading(asked)):
            print(json.dumps(row))
    elif len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]))))
    else:
        for row in run():
            print(json.dumps(row))
