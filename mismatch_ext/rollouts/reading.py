"""Recognises the host that wrote a file by the file's content, and reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.errors import RecordError, RunDirectoryError
from mismatch_ext.rollouts import nemo_rl, own, prime_rl, slime, trl, verl
from mismatch_ext.rollouts.logged import Logged, LoggedResponse

READABLE = (
    "mismatch-ext's own format, slime's --save-debug-rollout-data, prime-rl's traces.jsonl and NeMo-RL's "
    "train_data_step*.jsonl"
)


def read_rollouts(path: Path, version: str | None = None) -> Logged:
    """Read a file of logged rollouts.

    Args:
        path: The file; its name does not matter.
        version: Weight version whose responses are compared; None if the file holds only one.

    Raises:
        RecordError: The file is damaged or holds several versions, or its host logs no token ids and log-probabilities.
        RunDirectoryError: The file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror or error}.") from error
    if data.startswith(trl.MAGIC):
        trl.refuse(str(path))
    if data.startswith(slime.MAGIC):
        return slime.read(str(path)).of_version(version)
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{path} is neither text nor a file of torch.save, first bytes {data[:4].hex(' ')}; read are {READABLE}."
        ) from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise RecordError(f"{path} is empty.")
    host, rows = own.HOST, list[LoggedResponse | None]()
    for number, line in numbered:
        last = number == numbered[-1][0] and not data.endswith(b"\n")
        host, found = _read_row(_object(line, f"{path}, line {number}", last), f"{path}, line {number}")
        rows += found
    kept = tuple(row for row in rows if row is not None)
    return Logged(path=str(path), host=host, responses=kept, left_out=len(rows) - len(kept)).of_version(version)


def _object(line: str, where: str, last: bool) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        cut = "; the file ends within it, as one that is still written, or was cut" if last else ""
        raise RecordError(f"{where} is no JSON: {error}{cut}.") from error
    except RecursionError as error:
        raise RecordError(f"{where} is no JSON that can be read: it is nested too deep.") from error
    if not isinstance(found, dict):
        raise RecordError(f"{where} is a {type(found).__name__}; it must be an object.")
    return found


def _read_row(row: Mapping[str, Any], where: str) -> tuple[str, list[LoggedResponse | None]]:
    if own.is_own(row):
        return own.HOST, [own.read_row(row, where)]
    if nemo_rl.is_nemo_rls(row):
        return nemo_rl.HOST, [nemo_rl.read_row(row, where)]
    if prime_rl.is_prime_rls(row):
        return prime_rl.HOST, prime_rl.read_row(row, where)
    if verl.is_verls(row):
        verl.refuse(where)
    keys = ", ".join(sorted(row)[:12]) or "nothing"
    raise RecordError(f"{where} holds {keys}, which no format that is known here has; read are {READABLE}.")
