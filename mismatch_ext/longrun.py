"""Reads a run directory in bounded memory: the last steps in full, and earlier steps as sums.

A run of up to `WHOLE` step lines is read as by `mismatch_ext.rundata.read_run`. For a longer run, the report's tables, verdict
and closing lines still cover all steps; its curves keep the smallest and the largest value of every stretch. Warnings, errors
and alarms are all kept; other events are only counted beyond `SAID` per name and segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mismatch_ext.older import OlderSteps
from mismatch_ext.rundata import EventRecord, ProfileRecord, Repeats, RunData, StepRecord
from mismatch_ext.rundata.lines import is_resume_step
from mismatch_ext.rundata.reading import Reader, open_metrics, read_lines

WHOLE = 4096
"""At most this many step lines are kept in full, and in a longer run at least half as many."""
SAMPLES = 512
"""At most this many records of profiles, and as many of token samples, are kept per split."""
SAID = 1000
"""At most this many events are kept per name and segment, and this many problems in all."""
ALL_KEPT = ("alarm", "overflow")


def read_long_run(run_dir: str | Path) -> RunData:
    """Read a run directory as `read_run` does, in bounded memory.

    Returns:
        The data; for a long run, `older` sums up the steps that `steps` lacks.

    Raises:
        RunDirectoryError: `metrics.jsonl` is missing or cannot be read.
    """
    with open_metrics(run_dir) as file:
        ahead = Reader()
        for number, line in enumerate(file):
            # Read the headers first: they say where later segments resumed, and steps undone by that must not be summed.
            if b'"header"' in line and b'"resume_step"' in line:
                ahead.add(number, line, torn=False)
                ahead = Reader(headers=ahead.headers)
        file.seek(0)
        found = [(header["segment"], header.get("resume_step")) for header in ahead.headers]
        reader = _BoundedReader(resumes=[(segment, step) for segment, step in found if is_resume_step(step)])
        read_lines(file, reader)
    return reader.finish(Path(run_dir))


@dataclass
class _BoundedReader(Reader):
    """Reads lines, and sums up what is too much to keep."""

    resumes: list[tuple[int, int]] = field(default_factory=list)
    older: dict[str, OlderSteps] = field(default_factory=dict)
    undone: dict[tuple[int, str], int] = field(default_factory=dict)
    repeats: dict[tuple[int, str], Repeats] = field(default_factory=dict)
    more_problems: int = 0
    _said: dict[tuple[int, str], int] = field(default_factory=dict)
    _profiles_of: Counter[str] = field(default_factory=Counter)
    _strides: dict[str, int] = field(default_factory=dict)
    _scatters_of: Counter[str] = field(default_factory=Counter)

    def problem(self, text: str) -> None:
        if len(self.problems) < SAID:
            self.problems.append(text)
        else:
            self.more_problems += 1

    def _undone(self, segment: int, step: int) -> bool:
        """Whether a later segment resumed from before this step."""
        return any(segment < later and step > resumed for later, resumed in self.resumes)

    def _keep_event(self, event: EventRecord) -> None:
        key = (event.segment, event.name)
        said = self._said[key] = self._said.get(key, 0) + 1
        if event.level != "info" or event.name in ALL_KEPT or said <= SAID:
            self.events.append(event)
            return
        before = self.repeats.get(
            key, Repeats(count=0, first_step=event.step, last_step=event.step, undone=0, last=event)
        )
        self.repeats[key] = Repeats(
            count=before.count + 1,
            first_step=min(before.first_step, event.step),
            last_step=max(before.last_step, event.step),
            undone=before.undone + self._undone(event.segment, event.step),
            last=event,
        )

    def _keep_step(self, key: tuple[int, str], record: StepRecord) -> None:
        if self._undone(record.segment, record.step):
            self.undone[key] = record.segment
            self.steps.pop(key, None)
            return
        older = self.older.get(record.split)
        if key not in self.steps and older is not None and record.step <= older.last_step:
            raise ValueError(
                f"step {record.step} of {record.split} comes after step {older.last_step} has been added up, "
                f"{WHOLE // 2} lines or more too late"
            )
        self.undone.pop(key, None)
        self.steps[key] = record
        if len(self.steps) > WHOLE:
            self._add_up()

    def _add_up(self) -> None:
        """Sum up the earlier half of the kept steps."""
        splits: dict[str, list[StepRecord]] = {}
        for key in sorted(self.steps)[: WHOLE // 2]:
            record = self.steps.pop(key)
            splits.setdefault(record.split, []).append(record)
        for split, records in splits.items():
            older = self.older.setdefault(split, OlderSteps())
            older.add([record.step for record in records], [record.metrics for record in records])

    def _keep_sampled(self, table: dict[tuple[int, str], Any], key: tuple[int, str], record: Any) -> None:
        if self._undone(record.segment, record.step):
            table.pop(key, None)
            return
        split = key[1]
        if table is self.profiles:
            self._profiles_of[split] += key not in table
            table[key] = record
            if self._profiles_of[split] > SAMPLES:
                first = sorted(k for k in table if k[1] == split)[: SAMPLES // 2]
                table[first[-1]] = pooled_profiles([table.pop(k) for k in first])
                self._profiles_of[split] -= len(first) - 1
            return
        # A plot shows only a part of the token samples, so keep every second one, then every fourth, and so on.
        stride = self._strides.get(split, 1)
        if self._scatters_of[split] % stride == 0 or key in table:
            table[key] = record
            of_split = [k for k in table if k[1] == split] if len(table) > SAMPLES else []
            if len(of_split) > SAMPLES:
                for dropped in sorted(of_split)[1::2]:
                    del table[dropped]
                self._strides[split] = 2 * stride
        self._scatters_of[split] += 1

    def _drop_abandoned(self) -> None:
        """Report what a killed segment recorded after the checkpoint that a later segment resumed from."""
        for segment, resumed in self.resumes:
            lost = sorted(k for k, of in self.undone.items() if of < segment and k[0] > resumed)
            for key in lost:
                del self.undone[key]
            self._say_abandoned(segment, resumed, lost)

    def finish(self, path: Path) -> RunData:
        data = super().finish(path)
        return replace(data, older=self.older, repeats=self.repeats, more_problems=self.more_problems)


def pooled_profiles(records: Sequence[ProfileRecord]) -> ProfileRecord:
    """Merge records of one split: sum counts, weight means by them, take maxima; leave out records with other bins."""
    pooled: dict[str, dict[str, list[float | None]]] = {}
    for name in {name: None for record in records for name in record.profiles}:
        found = [record.profiles[name] for record in records if name in record.profiles]
        edges, bins = found[0]["edges"], len(found[0]["count"])
        alike = [one for one in found if one["edges"] == edges and len(one["count"]) == bins]
        counts: list[float | None] = [sum(one["count"][i] or 0.0 for one in alike) for i in range(bins)]
        columns: dict[str, list[float | None]] = {"edges": edges, "count": counts}
        for column in ("abs_diff_mean", "k3_mean"):
            columns[column] = [
                sum((one["count"][i] or 0.0) * (one[column][i] or 0.0) for one in alike) / n if n else None
                for i, n in enumerate(counts)
            ]
        peaks = [[v for one in alike if (v := one["abs_diff_max"][i]) is not None] for i in range(bins)]
        columns["abs_diff_max"] = [max(peak, default=None) for peak in peaks]
        pooled[name] = columns
    return replace(records[-1], profiles=pooled)
