"""Logged rollouts: a line of JSON a response, which any host can write and `mismatch-ext doctor --rollouts` reads.

    {"prompt_ids": [5, 12], "response_ids": [7, 1], "rollout_logprobs": [-0.1, -2.3], "response_mask": [true, true]}

The mask may be left out where the policy sampled every token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mismatch_ext.doctor import Sample
from mismatch_ext.errors import RecordError, RunDirectoryError
from mismatch_ext.records import RolloutRecord

# Keys of a line of verl's `trainer.rollout_data_dir`.
VERL = {"input", "output", "score"}


def write_rollouts(records: Iterable[RolloutRecord], path: Path) -> None:
    """Write records as `read_rollouts` reads them; routes and provenance are left out.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    lines = [
        json.dumps(
            {
                "prompt_ids": record.prompt_ids,
                "response_ids": record.response_ids,
                # A token that a tool put has no log-probability.
                "rollout_logprobs": [
                    value if kept else None
                    for value, kept in zip(record.rollout_logprobs, record.response_mask, strict=True)
                ],
                "response_mask": [bool(kept) for kept in record.response_mask],
            },
            allow_nan=False,
        )
        for record in records
    ]
    try:
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror or error}.") from error


def read_rollouts(path: Path) -> Sample:
    """Read a file of logged rollouts.

    Raises:
        RecordError: A line is malformed, or of a host that logs no token ids and no log-probabilities; names the line.
        RunDirectoryError: The file cannot be read.
    """
    try:
        data = path.read_bytes()
        if data.startswith(b"PAR1"):
            raise RecordError(
                f"{path} is parquet, as TRL logs completions, which holds texts alone; the doctor needs token ids and the "
                "engine's log-probabilities: write records with mismatch_ext.rollouts.write_rollouts."
            )
        lines = data.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    rows = [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    return Sample(
        prompts=tuple(row[0] for row in rows),
        responses=tuple(row[1] for row in rows),
        masks=tuple(row[2] for row in rows),
        logprobs=tuple(row[3] for row in rows),
    )


def _row(line: str, where: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...], tuple[float, ...]]:
    try:
        found: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordError(f"{where} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise RecordError(f"{where} is a {type(found).__name__}; it must be an object.")
    if found.keys() >= VERL and "rollout_logprobs" not in found:
        raise RecordError(
            f"{where} is of verl's trainer.rollout_data_dir, which holds texts alone; the doctor needs token ids and the "
            "engine's log-probabilities: write records with mismatch_ext.rollouts.write_rollouts."
        )
    missing = {"prompt_ids", "response_ids", "rollout_logprobs"} - found.keys()
    if missing:
        raise RecordError(
            f"{where} has no {', '.join(sorted(missing))}; a line holds prompt_ids, response_ids and rollout_logprobs."
        )
    ids = [found["prompt_ids"], found["response_ids"]]
    if not all(isinstance(part, list) and all(type(t) is int and t >= 0 for t in part) for part in ids):
        raise RecordError(f"{where}: prompt_ids and response_ids must be lists of token ids >= 0.")
    if not ids[0] or not ids[1]:
        raise RecordError(f"{where}: prompt and response must have a token each.")
    mask, logprobs = found.get("response_mask", [True] * len(ids[1])), found["rollout_logprobs"]
    if not isinstance(mask, list) or not all(value in (0, 1) for value in mask):
        raise RecordError(f"{where}: response_mask must be a list of true and false.")
    if not isinstance(logprobs, list) or not all(v is None or type(v) in (int, float) for v in logprobs):
        raise RecordError(f"{where}: rollout_logprobs must be a list of numbers, null where the policy did not sample.")
    values = tuple(float("nan") if value is None else float(value) for value in logprobs)
    return tuple(ids[0]), tuple(ids[1]), tuple(map(bool, mask)), values
