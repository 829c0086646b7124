"""The run whose folder the doctor writes into, beside the run that it examined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.doctor.sides import Run

from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.longrun import read_long_run
from mismatch_ext.precision.names import spelled
from mismatch_ext.provenance import SamplingSettings
from mismatch_ext.rundata import METRICS_FILE


def unlike(out: Path, sides: Run) -> tuple[str, ...]:
    """Say in what the run of a folder computed or sampled otherwise than the one that was examined.

    Args:
        out: The folder; one that holds no run, or one that cannot be read, is like any.
        sides: The run that was examined.
    """
    if not (out / METRICS_FILE).is_file():
        return ()
    try:
        header = read_long_run(out).header
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
    own = asdict(SamplingSettings()) | dict(sides.sampling)
    for name, value in sampling.items():
        if name in own and _plain(value) != _plain(own[name]):
            yield f"{name} {value}, not {own[name]}"


def _plain(value: Any) -> Any:
    # vLLM and TRL have two ways to say that top_k cuts nothing.
    return 0 if value in (-1, None) else value
