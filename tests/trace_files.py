"""Routing traces on disk, for tests that hand them to other processes: one uncompressed `.npz`.

Its header is JSON and has a version; shared parts are stored once.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.trace import RoutingTrace

SCHEMA = 2
READABLE = (1, SCHEMA)
"""Files of schema 1 have no token ids: their traces have to be given them by `RoutingTrace.of_tokens` before a replay."""
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, NotImplementedError, RuntimeError, MemoryError,
    OverflowError, struct.error, zipfile.BadZipFile,
)  # fmt: skip
"""What numpy, zipfile and json raise on a file cut short or overwritten."""


def save_traces(path: str | Path, traces: Sequence[RoutingTrace]) -> None:
    """Write traces to a file, complete or not at all.

    Args:
        path: The file, `.npz`.
        traces: What to write; parts that several traces share are written once.
    """
    path = Path(path)
    arrays: dict[str, NDArray[Any]] = {}
    names: dict[int, str] = {}
    entries: list[dict[str, Any]] = []
    for trace in traces:
        for part in trace.parts:
            if id(part) not in names:
                names[id(part)] = f"part{len(names)}"
                arrays[names[id(part)]] = part.cpu().numpy()
        entries.append(
            {
                "parts": [names[id(part)] for part in trace.parts],
                "layers": trace.layers,
                "num_experts": trace.num_experts,
                "start": trace.start,
                "rows": trace.rows,
                "versions": trace.versions,
            }
        )
        for field, known in (("tokens", trace.tokens), ("starts", trace.starts)):
            if known is not None:
                entries[-1][field] = f"{field}{len(entries)}"
                arrays[f"{field}{len(entries)}"] = known.cpu().numpy()
    document = json.dumps({"schema": SCHEMA, "traces": entries}).encode()
    arrays["header"] = np.frombuffer(document, dtype=np.uint8)
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    unfinished.replace(path)


def load_traces(path: str | Path) -> list[RoutingTrace]:
    """Read the traces that `save_traces` wrote; parts that were shared are shared again.

    Raises:
        RoutingError: The file is missing, truncated, of another schema, or holds something else; names it.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            document = json.loads(archive["header"].tobytes())
            schema = document.get("schema")
            if schema in READABLE:
                parts = {name: torch.from_numpy(archive[name]) for name in archive.files if name != "header"}
                return [_trace(entry, parts) for entry in document["traces"]]
    except UNREADABLE as error:
        raise RoutingError(
            f"routing file {path} cannot be read ({type(error).__name__}: {error}); it is missing, truncated or not a file of "
            "routing traces. Record the routes again."
        ) from error
    raise RoutingError(f"routing file {path} is of schema {schema!r}; this release reads schemas {READABLE}.")


def _trace(entry: dict[str, Any], parts: dict[str, Tensor]) -> RoutingTrace:
    trace = RoutingTrace(
        parts=tuple(parts[name] for name in entry["parts"]),
        layers=tuple(int(layer) for layer in entry["layers"]),
        num_experts=int(entry["num_experts"]),
        start=int(entry["start"]),
        versions=tuple((int(row), int(version)) for row, version in entry["versions"]),
        tokens=parts[entry["tokens"]] if "tokens" in entry else None,
        starts=parts[entry["starts"]] if "starts" in entry else None,
    )
    if trace.rows != entry["rows"]:
        raise RoutingError(f"a trace has {trace.rows} rows, its header says {entry['rows']}.")
    return trace


def traces_nbytes(traces: Iterable[RoutingTrace]) -> int:
    """Return the bytes that traces occupy together, with shared parts counted once."""
    seen = {(part.data_ptr(), part.nbytes): part.nbytes for trace in traces for part in trace.parts}
    return sum(seen.values())
