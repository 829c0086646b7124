"""Times each phase of the doctor's trainer side against one scoring pass over the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers.doctor.causes import of_model
from mismatch_ext.adapters.transformers.doctor.models import load_model
from mismatch_ext.adapters.transformers.doctor.scorer import Scorer

from examples.arithmetic.shipped import FOLDER
from mismatch_ext.doctor import Sample, diagnose

RESPONSES, LENGTH = 128, 48


def clean_sample() -> Sample:
    """Return tokens that the dense model samples itself, with the log-probabilities of its own bfloat16."""
    model = load_model(FOLDER / "dense")
    torch.manual_seed(0)
    ids = torch.randint(2, 12, (RESPONSES, 4))
    prompts = tuple(map(tuple, ids.tolist()))
    with torch.no_grad():
        for _ in range(LENGTH):
            ids = torch.cat([ids, torch.multinomial(model(ids).logits[:, -1].softmax(-1), 1)], 1)
    made = tuple(map(tuple, ids[:, 4:].tolist()))
    blank = Sample(
        prompts=prompts,
        responses=made,
        masks=((True,) * LENGTH,) * RESPONSES,
        logprobs=((0.0,) * LENGTH,) * RESPONSES,
    )
    own = Scorer(model, blank, trainer_dtype="bfloat16", engine_dtype="bfloat16").scores.own
    return replace(blank, logprobs=tuple(map(tuple, own.reshape(RESPONSES, LENGTH).tolist())))


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that something takes, and what it returns."""
    start = perf_counter()
    found = what()
    return perf_counter() - start, found


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark."""
    sample = clean_sample()
    scores, scorer = timed(
        lambda: Scorer(load_model(FOLDER / "dense"), sample, trainer_dtype="bfloat16", engine_dtype="bfloat16")
    )
    one = min(timed(scorer.logprobs)[0] for _ in range(3))
    quick, first = timed(lambda: diagnose(sample, scorer.scores))
    whole, second = timed(lambda: diagnose(sample, scorer.scores, of_model(scorer)))
    assert first.verdict == second.verdict == "clean", (first.causes, second.causes)
    ids = torch.tensor([[*p, *r] for p, r in zip(sample.prompts, sample.responses, strict=True)])
    with torch.no_grad():
        logp = scorer.model(ids).logits[:, 3:-1].double().log_softmax(-1).gather(-1, ids[:, 4:, None]).flatten().numpy()
    assert np.allclose(scorer.logprobs(), logp, atol=1e-5)
    return [
        {
            "name": f"the trainer's side of the doctor, {phase}, against one scoring pass of {len(sample.tokens):,} tokens",
            "ours": seconds,
            "theirs": one,
            "ratio": one / seconds,
            "equal": "log-probabilities of one plain forward to 1e-5; the verdict with and without causes that need a pass",
        }
        for phase, seconds in (
            ("scores and own noise", scores),
            ("--quick", scores + quick),
            ("all causes", scores + whole),
        )
    ]
