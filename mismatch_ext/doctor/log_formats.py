"""Rollout files that frameworks log, for `mismatch-ext doctor --rollouts`: a table of formats, and one reader for all of them.

To add a format, add a `Format` to `FORMATS`. It names the keys by which a line or a file is recognized, and the key of each field
of a row. If a line or a file is not one flat row, write a function for it in `log_rows.py` that yields its rows.
"""

from __future__ import annotations

import codecs
import gzip
import json
import math
import pickle
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field

from mismatch_ext.doctor.log_rows import (
    Flags,
    Id,
    Ids,
    Logprobs,
    Rows,
    Strict,
    checked,
    line_of_routes,
    one_row,
    own_rows,
    prime_rl_rows,
    short,
    slime_rows,
)
from mismatch_ext.doctor.logged import OWN, Kept, Logged, LoggedResponse, LoggedRoutes
from mismatch_ext.errors import RecordError, RunDirectoryError
from mismatch_ext.files import write_whole
from mismatch_ext.rollout import RolloutRecord

WRITE = "write records with mismatch_ext.doctor.write_rollouts"
TEXTS = f"which holds texts alone; the doctor needs token ids and the engine's log-probabilities: {WRITE}"
OURS = (
    "A line of our own has the keys prompt_ids, response_ids and rollout_logprobs (token ids and nats, one per response token): "
    'rename yours, or see "Logged rollouts" in docs/doctor.md.'
)
ZIP, PARQUET, GZIP = b"PK\x03\x04", b"PAR1", b"\x1f\x8b"
# Rewards are often numpy numbers; unpickling these cannot run code from the file.
NUMBERS: list[Any] = [np.float64(0).__reduce__()[0], np.dtype, codecs.encode]
NUMBERS += [type(np.dtype(kind)) for kind in ("bool", "int32", "int64", "float32", "float64")]
# Fields without which a row has no tokens.
IDS = ("prompt_ids", "response_ids", "tokens", "response_length", "length")


Name = Annotated[str, BeforeValidator(str)]
OneIsList = BeforeValidator(lambda value: [value] if isinstance(value, int | str) else value)


class Values(Strict):
    """What the fields of a row may hold. A key that is absent or null has the default."""

    prompt_ids: Annotated[Ids, Field(min_length=1)] = []
    response_ids: Annotated[Ids, Field(min_length=1)] = []
    tokens: Ids = []
    response_length: Id = 0
    length: Id = sys.maxsize
    mask: Flags = []
    logprobs: Logprobs = []
    trainer_logprobs: Logprobs | None = None
    versions: Annotated[list[Name], OneIsList] = []
    step: Name | None = None
    settings: dict[str, Any] = {}
    routes: Any = None
    kept: Any = None


@dataclass(frozen=True, kw_only=True)
class Format:
    """How to recognize one framework's files, and the key under which a row holds each field; None if its rows lack the field.

    The tokens are in one of three forms. The columns (`mask`, `logprobs`, `trainer_logprobs`) have a value for each token of the
    response, and in the last form for each token of the sequence:

    - `prompt_ids` and `response_ids`
    - `tokens`, of which the last `response_length` are the response
    - `tokens` and `mask`: the response begins at the first sampled token. `length` leaves out padding on the right.
    """

    name: str
    files: str  # what writes them, for messages
    container: Literal["lines", "torch.save"] = "lines"  # of JSON, or one object in a file
    recognized_by: tuple[str, ...]  # keys of a line's object, or of the file's
    rows: Callable[[Mapping[str, Any], str], Rows] = one_row
    is_batch: bool = False  # whether a row is a batch of one: each field that is read is a list with one entry
    prompt_ids: str | None = None
    response_ids: str | None = None
    tokens: str | None = None
    response_length: str | None = None
    length: str | None = None
    mask: str | None = None  # true where the policy sampled a token; without it, everywhere in the response
    logprobs: str | None = None  # the engine's, in nats
    trainer_logprobs: str | None = None
    versions: str | None = None  # of the weights that sampled the row: a number, a name, or a list of them
    step: str | None = None  # the step that trained on the row
    settings: str | None = None  # an object of sampling settings
    routes: str | None = None  # experts [tokens, layers, experts] from the first token on, or `LoggedRoutes`
    kept: str | None = None  # why a run kept the row as evidence, a `Kept`
    lists_unused: bool = False  # whether the report lists the keys of a row that are not read
    hint: str = ""  # what to say if a row lacks a key
    refused: str = ""  # why these files cannot be read

    @property
    def keys(self) -> dict[str, str]:
        """The key of each field that the rows have."""
        named = {field: getattr(self, field) for field in Values.model_fields}
        return {field: key for field, key in named.items() if key is not None}

    @property
    def is_whole(self) -> bool:
        """Whether the columns cover the prompt as well."""
        return self.response_ids is None and self.response_length is None


# Any loop can write it; see `write_rollouts`.
_OWN = Format(
    name=OWN,
    files=OWN,
    recognized_by=("prompt_ids", "response_ids"),
    rows=own_rows,
    prompt_ids="prompt_ids",
    response_ids="response_ids",
    mask="response_mask",
    logprobs="rollout_logprobs",
    trainer_logprobs="trainer_logprobs",
    versions="weight_version",
    step="step",
    settings="provenance",
    routes="routes",
    kept="kept",
    lists_unused=True,
    hint=OURS,
)
# Also --dump-details: slime/observability/rollout_data_utils.py (THUDM/slime, commit
# 624b824a898ab0ec1fcb4d373004c7f3852bf515). `slime_rows` adds `step`.
_SLIME = Format(
    name="slime",
    files="slime's --save-debug-rollout-data",
    container="torch.save",
    recognized_by=("samples",),
    rows=slime_rows,
    tokens="tokens",
    response_length="response_length",
    mask="loss_mask",
    logprobs="rollout_log_probs",
    versions="weight_versions",
    routes="rollout_routed_experts",  # of all decoder layers, for each token but the last
    step="step",
    hint="slime logs it unless a generate function of your own leaves it out.",
)
# nemo_rl/algorithms/grpo.py (NVIDIA-NeMo/RL, commit 7ea279abfbeb698b092856d0dab61e7cf39bc909).
_NEMO_RL = Format(
    name="NeMo-RL",
    files="NeMo-RL's train_data_step*.jsonl",
    recognized_by=("token_loss_mask", "input_lengths", "idx"),
    is_batch=True,
    tokens="token_ids",
    length="input_lengths",
    mask="token_loss_mask",
    logprobs="generation_logprobs",
    trainer_logprobs="prev_logprobs",
    hint="NeMo-RL's GRPO logs it, its distillation does not.",
)
# src/prime_rl/monitors/file.py (PrimeIntellect-ai/prime-rl, commit 559b44772e471d1538537b8805cc77f3824a5e64), in
# rollouts/step_N/train/*. The keys are those of `prime_rl_rows`; `versions` are the weights' at the episode's start and end.
_PRIME_RL = Format(
    name="prime-rl",
    files="prime-rl's traces.jsonl",
    recognized_by=("env", "task", "traces"),
    rows=prime_rl_rows,
    tokens="tokens",
    mask="mask",
    logprobs="logprobs",
    versions="versions",
    settings="sampling",
    step="step",
)
# No tokenizer recovers the ids, because the texts are decoded without special tokens.
_VERL = Format(
    name="verl",
    files="verl's trainer.rollout_data_dir or validation_data_dir",
    recognized_by=("input", "output", "score", "step"),
    refused=TEXTS,
)
FORMATS = (_OWN, _SLIME, _NEMO_RL, _PRIME_RL, _VERL)
"""The first one that recognizes a line or a file reads it."""


def read_rollouts(path: Path, version: str | None = None) -> Logged:
    """Read a file of logged rollouts, or those of one version; raises RecordError, or RunDirectoryError if it cannot be read."""
    host = ""
    responses: list[LoggedResponse] = []
    left_out = 0
    for where, content, container in objects_of(path):
        format = _recognized(content, container, where)
        host = format.name
        for place, row in format.rows(content, where):
            response = _response(format, row, place)
            if response is None:
                left_out += 1
            else:
                responses.append(response)
    logged = Logged(
        path=str(path), host=host, responses=tuple(responses), left_out=left_out, scored_late=_scored_late(responses)
    )
    return logged if version is None else logged.of_version(version)


def objects_of(path: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield the object of each line, or the one of a `torch.save` file, with its place and the container."""
    try:
        data = path.read_bytes()
        if data.startswith(GZIP):
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(f"{path} is a damaged gzip file: {error}. Copy it again, or take another.") from error
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror or error}.") from error
    if data.startswith(PARQUET):
        raise RecordError(f"{path} is parquet, as TRL's log_completions writes it, {TEXTS}.")
    if data.startswith(ZIP):
        yield str(path), _unpickled(path), "torch.save"
        return
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{path} is neither text nor a file of torch.save, first bytes {data[:4].hex(' ')}; read are {_readable()}."
        ) from error
    if not text.strip():
        raise RecordError(f"{path} is empty.")
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{where} is no JSON: {short(error)}.") from error
        yield where, content, "lines"


def _unpickled(path: Path) -> Any:
    """Return the object in a file of `torch.save`; what could run code is not unpickled."""
    try:
        with torch.serialization.safe_globals(NUMBERS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RecordError(
            f"{path} holds objects that are not unpickled, since a file could run code by them: {short(error)}; leave them out "
            f"of slime's Sample.metadata, or {WRITE}."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise RecordError(f"{path} is a damaged file of torch.save: {short(error)}") from error


def _recognized(content: Any, container: str, where: str) -> Format:
    """Return the format of an object, by its keys."""
    if not isinstance(content, dict):
        raise RecordError(f"{where} is a {type(content).__name__}; it must be an object.")
    for format in FORMATS:
        if format.container == container and content.keys() >= set(format.recognized_by):
            if format.refused:
                raise RecordError(f"{where} is of {format.files}, {format.refused}.")
            return format
    keys = ", ".join(sorted(map(str, content))[:12]) or "nothing"
    raise RecordError(f"{where} holds {keys}, which no format that is known here has; read are {_readable()}. {OURS}")


def _readable() -> str:
    return ", ".join(format.files for format in FORMATS if not format.refused)


def _response(format: Format, row: Mapping[str, Any], where: str) -> LoggedResponse | None:
    """Return a row's response; None if the policy sampled none of its tokens."""
    values = _values(format, row, where)
    sequence = [*values.prompt_ids, *values.response_ids, *values.tokens][: values.length]
    scored = values.trainer_logprobs
    if format.is_whole:
        mask = values.mask[: values.length]
        scored = None if scored is None else scored[: values.length]
        for key, column in ((format.mask, mask), (format.trainer_logprobs, scored)):
            if column is not None and len(column) != len(sequence):
                raise RecordError(f"{where}: {len(column)} {key} for {len(sequence)} tokens; the two must be equal.")
        start = mask.index(True) if True in mask else len(sequence)
        columns = slice(start, values.length)
        # Frameworks write zeros where nothing was scored.
        scored = scored if any(scored or ()) else None
    else:
        start = max(0, len(sequence) - (values.response_length or len(values.response_ids)))
        columns = slice(None)
    response = sequence[start:]
    mask = values.mask[columns] or [True] * len(response)
    # A row that names its response stays even if all of it is masked, so that its weight version counts.
    if not any(mask) and format.response_ids is None:
        return None
    if "logprobs" not in values.model_fields_set:
        raise RecordError(f"{where} has no {format.logprobs}. {format.hint}".rstrip())
    trainer_logprobs = None if scored is None else tuple(scored[columns])
    unused = row.keys() - set(format.keys.values()) if format.lists_unused else ()
    return LoggedResponse(
        where=where,
        prompt_ids=tuple(sequence[:start]),
        response_ids=tuple(response),
        mask=tuple(mask),
        logprobs=tuple(values.logprobs[columns]),
        versions=tuple(values.versions),
        step=values.step,
        trainer_logprobs=trainer_logprobs,
        settings=values.settings,
        routes=_routes(values.routes, f"{where}: {format.routes}"),
        unused=tuple(unused),
        kept=values.kept if isinstance(values.kept, Kept) else None,
    )


def _values(format: Format, row: Mapping[str, Any], where: str) -> Values:
    """Return what a row holds under the format's keys."""
    keys = format.keys
    given = {field: row.get(key) for field, key in keys.items() if field in IDS or row.get(key) is not None}
    if format.is_batch:
        given = {field: _only(column, f"{where}: {keys[field]}") for field, column in given.items()}
    return checked(Values, given, where, keys)


def _only(column: Any, place: str) -> Any:
    if not isinstance(column, list) or len(column) != 1:
        raise RecordError(f"{place} must be a list with one entry, found {short(column)}.")
    return column[0]


def _routes(routes: Any, place: str) -> LoggedRoutes | None:
    if routes is None or isinstance(routes, LoggedRoutes):
        return routes
    try:
        experts = torch.as_tensor(routes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{place} cannot be read: {short(error)}.") from error
    if experts.dim() != 3 or experts.is_floating_point():
        raise RecordError(
            f"{place} is {experts.dtype} {tuple(experts.shape)}; it must be integers [tokens, layers, experts]."
        )
    return LoggedRoutes(experts=experts.numpy())


def _scored_late(responses: list[LoggedResponse]) -> bool:
    kept = [response.kept for response in responses if response.kept is not None]
    if kept and len(kept) == len(responses):
        return any(row.late for row in kept)
    versions = {version for response in responses for version in response.versions}
    return any(
        len(versions) > 1 if response.step is None else response.step != response.version for response in responses
    )


def write_rollouts(records: Iterable[RolloutRecord], path: Path, *, routes: bool = True) -> None:
    """Write records as JSON lines, for `mismatch-ext doctor --rollouts`.

    Args:
        records: The rollouts.
        path: The file.
        routes: Whether to write the experts of each token, if they were recorded. They take a byte or two for each token, layer
            and expert, plus a third for base64.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    lines = [json.dumps(_line_of(record, routes), allow_nan=False) for record in records]
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def _line_of(record: RolloutRecord, routes: bool) -> dict[str, Any]:
    # A token that a tool inserted may have none.
    logprobs = [value if math.isfinite(value) else None for value in record.rollout_logprobs.tolist()]
    line = {
        "prompt_ids": record.prompt_ids.tolist(),
        "response_ids": record.response_ids.tolist(),
        "rollout_logprobs": logprobs,
        "response_mask": record.response_mask.tolist(),
        "provenance": asdict(record.provenance),
    }
    if routes and record.routing is not None:
        line["routes"] = line_of_routes(record.routing)
    return line
