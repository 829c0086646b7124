"""This package's own format, which any host can write: one line of JSON per response.

    {"prompt_ids": [5, 12], "response_ids": [7, 1], "rollout_logprobs": [-0.1, -2.3], "response_mask": [true, true]}

The mask may be left out if the policy sampled every token. `provenance` holds the fields of `Provenance`; unknown ones may be
left out. `routes` holds the engine's experts, in base64.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_ext.errors import RecordError
from mismatch_ext.files import write_whole
from mismatch_ext.records import RolloutRecord
from mismatch_ext.rollouts.fields import ensure_keys, flags, logprobs, token_ids
from mismatch_ext.rollouts.logged import LoggedResponse, LoggedRoutes
from mismatch_ext.routing import RoutingTrace

HOST = "mismatch-ext's own format"
NEEDED = ("prompt_ids", "response_ids", "rollout_logprobs")
# Little-endian, so that a file is the same on every machine.
DTYPES = {"uint8": "<u1", "uint16": "<u2"}


def write_rollouts(records: Iterable[RolloutRecord], path: Path, *, routes: bool = True) -> None:
    """Write records as `read_rollouts` reads them.

    Args:
        records: The rollouts.
        path: The file.
        routes: Whether to write the experts of each token, if they were recorded. They take a byte or two for each token, layer
            and expert, plus a third for base64.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    lines = [json.dumps(_of_record(record, routes), allow_nan=False) for record in records]
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def _of_record(record: RolloutRecord, routes: bool) -> dict[str, Any]:
    found = {
        "prompt_ids": list(map(int, record.prompt_ids)),
        "response_ids": list(map(int, record.response_ids)),
        # A token that a tool inserted has no log-probability.
        "rollout_logprobs": [
            float(value) if kept else None
            for value, kept in zip(record.rollout_logprobs, record.response_mask, strict=True)
        ],
        "response_mask": [bool(kept) for kept in record.response_mask],
        "provenance": asdict(record.provenance),
    }
    if routes and record.routing is not None:
        found["routes"] = _of_trace(record.routing)
    return found


def _of_trace(trace: RoutingTrace) -> dict[str, Any]:
    experts = trace.experts.cpu().numpy()
    return {
        "start": trace.start,
        "layers": list(trace.layers),
        "num_experts": trace.num_experts,
        "shape": list(experts.shape),
        "dtype": experts.dtype.name,
        "experts": base64.b64encode(experts.astype(DTYPES[experts.dtype.name]).tobytes()).decode("ascii"),
    }


def is_own(row: Mapping[str, Any]) -> bool:
    """Whether a row is meant to be in this format."""
    return "prompt_ids" in row and "response_ids" in row


def read_row(row: Mapping[str, Any], where: str) -> LoggedResponse:
    """Read one response.

    Raises:
        RecordError: A field is missing or malformed; names it.
    """
    ensure_keys(row, NEEDED, where, "a line holds prompt_ids, response_ids and rollout_logprobs")
    prompt, response = token_ids(row, "prompt_ids", where), token_ids(row, "response_ids", where)
    if not prompt or not response:
        raise RecordError(f"{where}: prompt and response must have a token each.")
    version, settings = _provenance(row.get("provenance"), where)
    return LoggedResponse(
        where=where,
        prompt_ids=prompt,
        response_ids=response,
        mask=(True,) * len(response) if row.get("response_mask") is None else flags(row, "response_mask", where),
        logprobs=logprobs(row, "rollout_logprobs", where),
        versions=version,
        settings=settings,
        routes=_routes(row.get("routes"), where),
    )


def _provenance(found: Any, where: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    if found is None:
        return (), {}
    sampling = found.get("sampling", {}) if isinstance(found, dict) else None
    if not isinstance(sampling, dict):
        raise RecordError(f"{where}: provenance must be an object, and its sampling one too.")
    version = found.get("weight_version")
    if version is not None and type(version) not in (int, str):
        raise RecordError(f"{where}: provenance weight_version must be an integer, or a text.")
    names = ("engine", "engine_version", "dtype", "kv_cache_dtype", "logprobs_mode")
    settings = {name: found[name] for name in names if found.get(name) is not None} | sampling
    if not all(type(value) in (int, float, str, bool) for value in settings.values()):
        raise RecordError(f"{where}: what provenance says must be numbers and texts.")
    return () if version is None else (str(version),), settings


def _routes(found: Any, where: str) -> LoggedRoutes | None:
    if found is None:
        return None
    try:
        data = base64.b64decode(found["experts"], validate=True)
        experts = np.frombuffer(data, dtype=DTYPES[found["dtype"]]).reshape(found["shape"])
        layers, num_experts, start = found["layers"], found["num_experts"], found["start"]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise RecordError(f"{where}: routes cannot be read: {type(error).__name__} {error}.") from error
    if not all(type(value) is int for value in (*layers, num_experts, start)):
        raise RecordError(f"{where}: routes must have layers, num_experts and start as integers.")
    return LoggedRoutes(experts=experts, start=start, layers=tuple(layers), num_experts=num_experts)
