"""Compares the run that already lies in the doctor's output folder with the run that the doctor examined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.doctor.sides import Run

from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.log_reading import read_run
from mismatch_ext.precision.dtypes import spelled
from mismatch_ext.rollout import SamplingSettings


def unlike(out: Path, sides: Run) -> tuple[str, ...]:
    """Return a note if the run in a folder computed or sampled otherwise than the examined run; otherwise nothing.

    Args:
        out: The folder; if it holds no run, or one that cannot be read, there is no note.
        sides: The run that was examined.
    """
    try:
        header = read_run(out).header
    except RunDirectoryError:
        return ()
    differing = list(_differing(header, sides))
    if not differing:
        return ()
    return (
        f"the run in {out} had {', '.join(differing)}: what its command line said beside its file, say it to the doctor too",
    )


def _differing(header: Mapping[str, Any], sides: Run) -> Iterator[str]:
    engine, sampling = (header.get(key) or {} for key in ("engine", "sampling"))
    if (dtype := engine.get("model_dtype")) is not None and spelled(dtype) != sides.dtype:
        yield f"an engine in {spelled(dtype)}, not {sides.dtype}"
    examined = asdict(SamplingSettings()) | dict(sides.sampling)
    for name, value in sampling.items():
        if name in examined and _plain(value) != _plain(examined[name]):
            yield f"{name} {value}, not {examined[name]}"


def _plain(value: Any) -> Any:
    # For top_k, -1 and None mean the same as 0: nothing is cut.
    return 0 if value in (-1, None) else value
