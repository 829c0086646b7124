"""Measures how an engine differs from itself on the same tokens: decode, and one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.sides import DoctorsEngine, Run

from mismatch_ext.doctor import Sample
from mismatch_ext.doctor.evidence import ALONE, DECODE, SAMPLED_AGAIN, Engine, Rung

# Numbers of responses that are scored again one at a time, and sampled without settings; and the same in a quick look.
ALONE_ROWS, NEUTRAL_ROWS = 16, 32
QUICK_ALONE_ROWS, QUICK_NEUTRAL_ROWS = 8, 16


@runtime_checkable
class ScoresAlone(DoctorsEngine, Protocol):
    """An engine that can score one request at a time."""

    def score_alone(self, sample: Sample) -> Sample:
        """Score as `score` does, but send each response's request only after the one before was answered."""


def engine_rungs(
    engine: DoctorsEngine,
    sides: Run,
    sample: Sample,
    again: Sample,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    same: bool,
    quick: bool = False,
) -> Engine:
    """Measure how a running engine differs from itself.

    Args:
        engine: The engine.
        sides: The run.
        sample: Responses that the engine sampled.
        again: The same tokens, scored by the engine as part of prompts.
        prompts: Token ids of each prompt, as the trainer has them.
        max_tokens: Largest number of tokens of a response.
        same: Whether the engine sampled from the trainer's own prompts.
        quick: Ask it about fewer responses.

    Raises:
        MismatchError: The engine refuses a request.
    """
    if not isinstance(engine, ScoresAlone):
        # A server also has other requests, and may sample with settings that the doctor does not know.
        note = f"not measured with this engine: {DECODE}, {ALONE}"
        return Engine(
            rungs=(Rung.of("engine", SAMPLED_AGAIN, sample.engine - again.engine),),
            decode=np.zeros(1),
            prefill=None,
            notes=(note,),
        )
    alone_rows, neutral_rows = (QUICK_ALONE_ROWS, QUICK_NEUTRAL_ROWS) if quick else (ALONE_ROWS, NEUTRAL_ROWS)
    rungs = []
    if same and _neutral(sides):
        decode, prefill = sample.engine - again.engine, again.engine
    else:
        rungs.append(Rung.of("engine", SAMPLED_AGAIN, sample.engine - again.engine))
        neutral = engine.sample(
            ToSample(
                prompts=prompts[:neutral_rows], responses=neutral_rows, max_tokens=max_tokens, sampling=_plain(sides)
            )
        )
        decode, prefill = neutral.engine - engine.score(neutral).engine, None
    rungs.append(Rung.of("engine", DECODE, decode))
    few = _with_tokens(again, list(range(min(alone_rows, len(again.responses)))))
    rungs.append(Rung.of("engine", ALONE, engine.score_alone(few).engine - few.engine))
    return Engine(rungs=tuple(rungs), decode=decode, prefill=prefill)


def _plain(sides: Run) -> dict[str, Any]:
    """Return sampling that changes nothing, with the run's seed."""
    return {"temperature": 1.0, "seed": int(sides.sampling.get("seed", 0))}


def _neutral(sides: Run) -> bool:
    """Tell whether a run's requests do not change the distribution, so that sampled tokens compare with scores of a prompt."""
    return all(key == "seed" or (key == "temperature" and value == 1) for key, value in sides.sampling.items())


def _with_tokens(sample: Sample, rows: list[int]) -> Sample:
    """Return these rows of a sample, and the sample's first two rows with sampled tokens."""
    sampled = [row for row, mask in enumerate(sample.masks) if any(mask)]
    return sample.part(sorted({*rows, *sampled[:2]}))
