"""What a log of both sides' log-probabilities shows beside the size of its gap: settings, placeholders, grids, lag, places.

Suffixes of shapes: N tokens that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mismatch_ext.doctor.logged import Logged, LoggedResponse
from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.errors import RecordError
from mismatch_ext.rollout import SamplingSettings

# A value that so many tokens share, or some places, stand out if their mean gap is this many times the others' and if they hold
# this share of the gap; choices.
REPEATED, TIMES, SHARE = 8, 3.0, 0.1
# Values are on a grid if all of so many are.
LEAST_ON_GRID = 64
GRIDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def finite_rows(logged: Logged) -> tuple[Logged, str | None]:
    """Return the log without sampled tokens that a side has no finite value for, and a note on these; None if there are none."""
    rows, lost = [], {"engine": 0, "trainer": 0}
    for response in logged.responses:
        trainer = response.trainer_logprobs or (0.0,) * len(response.mask)
        engine_has, trainer_has = np.isfinite(response.logprobs), np.isfinite(trainer)
        sampled = np.array(response.mask)
        lost["engine"] += int((sampled & ~engine_has).sum())
        lost["trainer"] += int((sampled & ~trainer_has).sum())
        rows.append(replace(response, mask=tuple((sampled & engine_has & trainer_has).tolist())))
    if not any(lost.values()):
        return logged, None
    counts = " and ".join(f"{count} of the {side}'s" for side, count in lost.items() if count)
    note = (
        f"not finite: {counts} log-probabilities of sampled tokens are missing, NaN or infinite. Logits that overflow or a mask "
        "that counts inserted tokens look like this; they are left out below"
    )
    return replace(logged, responses=tuple(rows)), note


def notes_of_settings(logged: Logged) -> Iterator[str]:
    """Yield why rows were kept, and what the two sides' settings do not share."""
    settings = _shared_settings(logged)
    if logged.kept is not None:
        yield f"kept: {logged.kept.reason}"
        heat, trainers = settings.get("temperature"), logged.kept.trainer.get("temperature")
        if None not in (heat, trainers) and heat != trainers:
            yield f"settings: the engine samples at temperature {heat:g}, and the trainer divides its logits by {trainers:g}"
    cuts: dict[str, Any] = {
        name: settings[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty") if name in settings
    }
    try:
        bias = SamplingSettings(**cuts).ratio_bias(renormalized=_renormalizes(settings))
    except (RecordError, TypeError):  # another program's settings
        bias = None
    if bias is not None:
        yield f"settings: {bias}"


def _shared_settings(logged: Logged) -> dict[str, Any]:
    """Return the settings that are the same in all responses."""
    first = dict(logged.responses[0].settings) if logged.responses else {}
    return {
        name: value
        for name, value in first.items()
        if all(response.settings.get(name) == value for response in logged.responses)
    }


def _renormalizes(settings: Mapping[str, Any]) -> bool:
    return settings.get("engine") != "sglang" and not str(settings.get("logprobs_mode", "")).startswith("raw")


def notes_of_values(logged: Logged, sample: Sample, trainer: Floats) -> Iterator[str]:
    """Yield what the values and places of the tokens tell; `trainer` are the trainer's log-probabilities `[N]`."""
    size = np.abs(sample.engine - trainer)
    yield from _repeated("engine", sample.engine, size)
    yield from _repeated("trainer", trainer, size)
    yield from _grid(sample.engine, trainer)
    yield from _lag(logged.responses)
    yield from _places(sample, size)


def _stands_out(which: NDArray[np.bool_], size: Floats) -> str | None:
    """Return how much of the gap some tokens hold, if that is far more than the others do."""
    if not which.any() or which.all():
        return None
    share = float(size[which].sum() / max(size.sum(), 1e-300))
    if share < SHARE or size[which].mean() < TIMES * size[~which].mean():
        return None
    return f"{share:.0%} of the gap"


def _repeated(side: str, values: Floats, size: Floats) -> Iterator[str]:
    found, counts = np.unique(values, return_counts=True)
    most = int(counts.argmax())
    if counts[most] < REPEATED:
        return
    share = _stands_out(values == found[most], size)
    if share is not None:
        yield (
            f"placeholder: the {side}'s log-probability is exactly {found[most]:g} on {counts[most]} sampled tokens, which hold "
            f"{share}: a value that stands for none looks like this"
        )


def _grid(engine: Floats, trainer: Floats) -> Iterator[str]:
    if len(engine) < LEAST_ON_GRID:
        return
    for name, dtype in GRIDS.items():
        on_grid = [bool((torch.tensor(side).to(dtype).double().numpy() == side).all()) for side in (engine, trainer)]
        if on_grid[0] != on_grid[1]:
            side, other = ("engine", "trainer") if on_grid[0] else ("trainer", "engine")
            yield f"grid: every log-probability of the {side} is a {name} number, and the {other}'s are finer"
            return


def _lag(responses: tuple[LoggedResponse, ...]) -> Iterator[str]:
    late = [response for response in responses if response.kept is not None and response.kept.late]
    if late:
        steps = ", ".join(sorted({str(response.step) for response in late}))
        yield f"lag: {len(late)} of {len(responses)} responses were scored by later weights (step {steps}) than sampled them"


def _places(sample: Sample, size: Floats) -> Iterator[str]:
    firsts = {row: mask.index(True) for row, mask in enumerate(sample.masks) if any(mask)}
    lasts = {row: len(mask) - 1 - mask[::-1].index(True) for row, mask in enumerate(sample.masks) if any(mask)}
    pairs = list(zip(sample.row.tolist(), sample.place.tolist(), strict=True))
    behind = [at > firsts[row] and not sample.masks[row][at - 1] for row, at in pairs]
    for name, which in (
        ("the first sampled token of each response", [at == firsts[row] for row, at in pairs]),
        ("the last sampled token of each response", [at == lasts[row] for row, at in pairs]),
        ("the first token after each turn of a tool", behind),
    ):
        share = _stands_out(np.array(which), size)
        if share is not None:
            yield f"where: {name} holds {share}"
