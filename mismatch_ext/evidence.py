"""Evidence: rows of a batch that an alarm, a failed weight check or a refused row leaves in the run folder.

A file is in our own format for logged rollouts, compressed with gzip: `mismatch-ext doctor --rollouts` reads it. While nothing
happens, a run only holds references to the batch that it has measured last.

Shapes: B rows of a batch, T tokens of its longest response.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.events import EVIDENCE
from mismatch_ext.files import write_whole
from mismatch_ext.precision.audit import TrainerReading
from mismatch_ext.rollout import Provenance, RolloutRecord
from mismatch_ext.routing import RoutingTrace

WORST, OTHERS = 8, 8
"""Rows of a file: those with the largest gaps, and others from all over the batch."""
ENOUGH, MOST_ROWS = 4096, 256
"""If responses are short, there are more others: until a file has so many sampled tokens, or so many rows. A doctor cannot tell
causes apart by a few hundred tokens, and gives shares from 2,000 on."""
MOST_FILES = 3
"""Files of a run, those before a resume included."""
OF_BAD_ROWS = 2
"""Files beyond which bad rows alone leave no further one, so that an alarm or a failed weight check finds room."""
FILES = "evidence-*.jsonl.gz"
CHECKPOINT = "CHECKPOINT"
"""Stands for a path that only the user knows."""


Column = Sequence[Any] | Tensor


@dataclass(frozen=True, kw_only=True)
class EvidenceRow:
    """One row of a batch as it was scored."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    rollout: Sequence[float | None]
    """The engine's log-probability of each response token, nats."""
    mask: Sequence[bool]
    """True where the policy sampled the token."""
    trainer: Sequence[float] | None = None
    """The trainer's log-probabilities, nats; None if the row was refused before it was scored."""
    provenance: Provenance | None = None
    routes: RoutingTrace | None = None
    sampled_after: int | None = None
    """Finished optimizer steps of the weights that sampled it; None if these are the weights that scored it."""
    pictured: bool = False
    """Whether its prompt has an image, which is not kept: its tokens alone do not tell what was scored."""
    left: int = 0
    """Pads before the prompt in the batch that was scored."""
    right: int = 0
    """Pads behind the response."""


class HeldBatch(Protocol):
    """A batch of which rows can be kept. Its methods are called only when something has happened."""

    step: int
    """Finished optimizer steps of the weights that scored it."""

    @property
    def settings(self) -> Callable[[], Mapping[str, Any]]:
        """A function that returns how the trainer computes.

        `host`, `dtype`, `weights`, `temperature`, `head`, `attention` and `replays`; some may be absent.
        """

    def names(self) -> Sequence[Sequence[str]]:
        """Return what each row may be called in the messages of errors."""

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return each row's mean |trainer - engine| over its sampled tokens, and their number, both `[B]`.

        The mean is NaN if one of the values is not finite, and 0 if no trainer has scored the row.
        """

    def row(self, number: int) -> EvidenceRow:
        """Return a row."""


@dataclass(kw_only=True, eq=False)
class ColumnBatch:
    """A batch by its columns, which have an entry per row: lists, or padded tensors with `prompt_mask` and `response_mask`.

    `mask` is None if the policy sampled every token, and `trainer` is None as long as no trainer has scored the batch.
    """

    prompts: Column
    responses: Column
    rollout: Column
    mask: Column | None = None
    prompt_mask: Column | None = None
    response_mask: Column | None = None
    trainer: Column | None = None
    provenance: Sequence[Provenance | None] | Provenance | None = None
    routes: Sequence[RoutingTrace | None] | None = None
    pictures: Sequence[int] | None = None  # how many images each prompt has
    known_as: Sequence[str] | None = None
    step: int = 0
    settings: Callable[[], Mapping[str, Any]] = dict

    @classmethod
    def of_records(cls, records: Sequence[RolloutRecord], **more: Any) -> ColumnBatch:
        """Return rollout records as a batch, with other fields of it."""
        return cls(
            prompts=[record.prompt_ids for record in records],
            responses=[record.response_ids for record in records],
            rollout=[record.rollout_logprobs for record in records],
            mask=[record.response_mask for record in records],
            provenance=[record.provenance for record in records],
            routes=[record.routing for record in records],
            known_as=[str(record.request_id) for record in records],
            **more,
        )

    def names(self) -> Sequence[Sequence[str]]:
        """Return what each row may be called in the messages of errors."""
        by_number = [f"row {row}" for row in range(len(self.prompts))]
        if self.known_as is None:
            return [[name] for name in by_number]
        return [[name, f"rollout {known}"] for name, known in zip(by_number, self.known_as, strict=True)]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return each row's mean gap and its number of sampled tokens, both `[B]`."""
        rows = [self.row(number) for number in range(len(self.prompts))]
        return torch.tensor([gap_of(row) for row in rows]), torch.tensor([sum(row.mask) for row in rows])

    def row(self, number: int) -> EvidenceRow:
        """Return a row without padding."""
        prompt, left, _ = _unpadded(self.prompts[number], _entry(self.prompt_mask, number))
        response, _, right = _unpadded(self.responses[number], _entry(self.response_mask, number))
        count = len(response)
        mask, trainer = _entry(self.mask, number), _entry(self.trainer, number)
        sampled = [True] * count if mask is None else [bool(value) for value in _plain(mask)[:count]]
        provenance = self.provenance
        if not isinstance(provenance, Provenance):
            provenance = _entry(provenance, number)
        return EvidenceRow(
            prompt_ids=prompt,
            response_ids=response,
            rollout=_plain(self.rollout[number])[:count],
            mask=sampled,
            trainer=None if trainer is None else _plain(trainer)[:count],
            provenance=provenance,
            routes=_entry(self.routes, number),
            pictured=bool(_entry(self.pictures, number)),
            left=left,
            right=right,
        )


def gap_of(row: EvidenceRow) -> float:
    """Return a row's mean |trainer - engine|, nats; NaN if a value is not finite, and 0 if no trainer has scored the row."""
    if len(row.rollout) != len(row.mask):
        return math.nan
    sampled = np.array(row.mask, dtype=bool)
    engine = np.array(row.rollout, dtype=np.float64)
    trainer = engine if row.trainer is None else np.array(row.trainer, dtype=np.float64)
    if not np.isfinite(engine[sampled]).all() or not np.isfinite(trainer[sampled]).all():
        return math.nan
    return float(np.abs(trainer - engine)[sampled].mean()) if sampled.any() else 0.0


def trainer_settings(
    reading: TrainerReading, *, host: str, temperature: float, replays: bool, **more: Any
) -> dict[str, Any]:
    """Return `HeldBatch.settings` from what was read back of a trainer, with what only its adapter knows."""
    held = reading.parameter_dtypes
    settings: dict[str, Any] = {
        "host": host,
        "dtype": reading.compute_dtype,
        "temperature": temperature,
        "replays": replays,
    }
    if held:
        settings["weights"] = max(held, key=held.__getitem__)
    if reading.head_dtype == "float32" != reading.compute_dtype:
        settings["head"] = "float32"
    return settings | more


def _entry(column: Column | None, number: int) -> Any:
    return None if column is None else column[number]


def _plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def _unpadded(values: Any, present: Any) -> tuple[list[int], int, int]:
    """Return the values between the padding on both sides, and how many pads each side has."""
    entries = _plain(values)
    if present is None:
        return entries, 0, 0
    places = [place for place, there in enumerate(_plain(present)) if there]
    if not places:
        return [], 0, len(entries)
    first, last = places[0], places[-1]
    return entries[first : last + 1], first, len(entries) - last - 1


def pick_rows(gaps: Tensor, tokens: Tensor, named: Iterable[int] = ()) -> tuple[list[int], list[int]]:
    """Return the worst rows of a batch and some others, by each row's gap and number of sampled tokens, both `[B]`.

    The worst are the rows that are `named`, then those that are not finite, then those with the largest gaps. The others are
    evenly spread over the rest, so that they show what is usual.
    """
    sizes = gaps.double().nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)
    by_size = sizes.argsort(descending=True, stable=True).tolist()
    worst = list(dict.fromkeys([*named, *by_size]))[:WORST]
    rest = sorted(set(range(len(gaps))) - set(worst))
    count, others = OTHERS, _spread(rest, OTHERS)
    while count < min(len(rest), MOST_ROWS - WORST) and int(tokens[worst + others].sum()) < ENOUGH:
        count = min(2 * count, MOST_ROWS - WORST)
        others = _spread(rest, count)
    return worst, others


def _spread(rows: Sequence[int], count: int) -> list[int]:
    """Return so many of some rows, evenly spread."""
    if len(rows) <= count:
        return list(rows)
    places = np.linspace(0, len(rows) - 1, count).round().astype(int)
    return [rows[place] for place in places]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A file of evidence."""

    path: Path
    step: int
    """Finished optimizer steps of the weights that scored its rows."""
    rows: int

    def command(self, checkpoint: str | Path = CHECKPOINT) -> str:
        """Return the command that examines it, with a checkpoint of those weights or near them."""
        out = self.path.parent / self.path.name.removesuffix(".jsonl.gz").replace("evidence-", "doctor_step_")
        words = ["mismatch-ext", "doctor", "--rollouts", self.path, "--model", checkpoint, "--out", out]
        return shlex.join(map(str, words))

    def sentence(self) -> str:
        """Return what was kept and how to examine it."""
        return (
            f"{self.rows} rows of the batch are kept in {self.path}. To examine them: {self.command()}, with the checkpoint of "
            f"step {self.step} or the nearest one that you saved. Leave --model out if there is none."
        )


class Evidence:
    """Holds the batch that was measured last, and writes some of its rows when something happens.

    An error while writing is a warning, once, and the run goes on. `event` writes into the metrics file, `tell` warns the user.
    """

    def __init__(self, run_dir: Path, event: Callable[..., None], tell: Callable[[str], None]) -> None:
        self._run_dir, self._event, self._tell = run_dir, event, tell
        self._held: HeldBatch | None = None
        self._awaited: str | None = None
        self._failed = False
        self.last: Kept | None = None

    def begin(self) -> None:
        """Forget the batches and files of an earlier training."""
        self._held = self._awaited = self.last = None
        self._failed = False

    def hold(self, batch: HeldBatch) -> None:
        """Hold a batch of training, in the place of the one before."""
        self._held = batch

    def await_batch(self, reason: str) -> None:
        """Keep rows of the next batch, which the weights in question have sampled, or of the present one if the run ends."""
        self._awaited = reason

    def measured(self, step: int) -> None:
        """Keep rows of the batch that is held now, if one was awaited."""
        reason, self._awaited = self._awaited, None
        if reason is not None:
            self.keep(step, reason)

    def keep(self, step: int, reason: str, batch: HeldBatch | None = None, *, most: int = MOST_FILES) -> Kept | None:
        """Write rows of a batch, by default of the one that is held, for something that happened in a step; None if it cannot.

        A step has one file, and nothing is written if the run has `most` of them.
        """
        batch = self._held if batch is None else batch
        path = self._run_dir / f"evidence-{step}.jsonl.gz"
        if batch is None or path.exists() or len(list(self._run_dir.glob(FILES))) >= most:
            return None
        try:
            lines = lines_of(batch, reason)
            if not lines:
                return None
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            write_whole(path, gzip.compress(text.encode(), mtime=0))
            kept = Kept(path=path, step=batch.step, rows=len(lines))
            data = {"path": str(path), "weights_step": batch.step, "rows": kept.rows, "command": kept.command()}
            self._event("info", EVIDENCE, kept.sentence(), data | {"reason": reason}, step=step)
        except Exception as error:  # noqa: BLE001  # a full disk or a batch that is gone must not end a run
            if not self._failed:
                self._tell(f"no evidence of step {step} was kept: {type(error).__name__}: {error} The run goes on.")
            self._failed = True
            return None
        self.last = kept
        return kept


def set_aside(folder: Path, segment: int) -> None:
    """Rename the files of an earlier run, by the number of the first segment of the next; one that cannot be is left."""
    for path in folder.glob(FILES):
        # Another job's files in one folder, or a disk that refuses, must not end a run.
        with contextlib.suppress(OSError):
            path.rename(path.with_name(f"before-{segment:03}-{path.name}"))


def lines_of(batch: HeldBatch, reason: str) -> list[dict[str, Any]]:
    """Return the lines of a file: the worst rows of a batch, and others; rows without a token are left out."""
    named = [row for row, names in enumerate(batch.names()) if any(_mentions(reason, name) for name in names)]
    worst, others = pick_rows(*batch.sizes(), named)
    settings = dict(batch.settings())
    lines = []
    for chosen, rows in (("worst", worst), ("other", others)):
        for number in rows:
            row = batch.row(number)
            if row.prompt_ids and row.response_ids:
                kept = {"row": number, "chosen": chosen, "reason": reason, "trainer": settings}
                lines.append(_line_of(row, batch.step, kept))
    return lines


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _line_of(row: EvidenceRow, step: int, kept: Mapping[str, Any]) -> dict[str, Any]:
    from mismatch_ext.doctor.log_rows import line_of_routes  # it takes a second to import, and most runs keep nothing

    padding = {"left_pads": row.left, "right_pads": row.right}
    line: dict[str, Any] = {
        "prompt_ids": [int(token) for token in row.prompt_ids],
        "response_ids": [int(token) for token in row.response_ids],
        "rollout_logprobs": _for_each_token(row, _or_null(row.rollout)),
        "response_mask": _for_each_token(row, list(map(bool, row.mask))),
        "step": step,
    }
    line["kept"] = {**kept, "sampled_after": row.sampled_after, "pictured": row.pictured, **padding}
    if row.trainer is not None:
        line["trainer_logprobs"] = _or_null(row.trainer)
    if row.provenance is not None:
        line["provenance"] = asdict(row.provenance)
    if row.routes is not None:
        line["routes"] = line_of_routes(row.routes)
    return line


def _for_each_token(row: EvidenceRow, column: list[Any]) -> list[Any]:
    """Return a column with an entry for each token of the response; what an engine has left out is null, or not sampled."""
    missing = len(row.response_ids) - len(column)
    filler: Any = False if column and isinstance(column[0], bool) else None
    return column[: len(row.response_ids)] + [filler] * missing


def _or_null(values: Sequence[float | None]) -> list[float | None]:
    # TRL's engine wrapper has None for NaN.
    return [float(value) if value is not None and math.isfinite(value) else None for value in values]
