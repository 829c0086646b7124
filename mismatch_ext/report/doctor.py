"""The findings of `mismatch-ext doctor`, as a section of the report or as a separate page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from mismatch_ext.log_reading import DOCTOR_FILE, RUN_FOLDER, first_of
from mismatch_ext.words import quantity

ADD_UP = "Parts of the gap, which add up, with 90 % intervals."


class _Read(BaseModel):
    """What is read of a part of the doctor's file; further keys may have any value."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Gap(_Read):
    logp_abs_diff_mean: float
    k3_kl: float


class _PartOfGap(_Read):
    name: str
    share: float | None
    mean: float | None


class _Cause(_Read):
    key: str
    said: str
    share: float | None
    status: str
    remedy: dict[str, str | None]


class _File(_Read):
    gap: _Gap
    tokens: int
    responses: int
    verdict: str
    notes: list[str]
    hints: list[str] = []
    parts: list[_PartOfGap] = []
    causes: list[_Cause] = []
    ratio: float | None = None
    measurable: bool | None = None
    unexplained: float | None = None
    conclusion: str | None = None
    seen: int = 0
    longest: int = 0


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why the two sides of a run differ, from the doctor's file."""

    name: str
    folder: Path  # of doctor.json
    gap: str  # what was measured, in words
    mean: float  # the same as a mean |log-probability difference| in nats
    parts: tuple[tuple[str, str, str], ...]  # name, share with its interval, and mean size in nats
    about_parts: str  # caption of their table
    # Name, share, how sure it is, lines to change in each host.
    causes: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...]
    notes: tuple[str, ...]
    verdict: str  # of `Diagnosis`, or "within the threshold"
    sentence: str  # the verdict as the doctor prints it
    # The engine's error in units of the trainer's own; None if that is too small to be a unit, or of another trainer.
    rounding: float | None = None
    confirmed: bool = False  # whether the remedy of a cause was tried, and the gap fell as predicted

    @property
    def advice(self) -> str | None:
        """The last clause of the report's verdict; None if the doctor named no cause."""
        if not self.causes:
            return None
        named = ", and that ".join(
            f"{said} ({', '.join(part for part in (share, sure) if part != '–')})"
            for said, share, sure, _ in self.causes
        )
        rest = "" if self.verdict == "explained" else ", which is a part of it"
        return f'the doctor found that {named}{rest}; change the lines under "Why the two sides differ"'

    def is_of(self, run: Path) -> bool:
        """Return whether this was found of a run, from the folder of its metrics: there, in a folder in it, or next to it."""
        run = run.resolve()
        return run in (self.folder, self.folder.parent) or (run.name == RUN_FOLDER and run.parent == self.folder)


def read_why(directory: str | Path) -> tuple[list[Why], list[tuple[str, str]]]:
    """Return what the doctor's files in a folder or below it say, and of each that is none of them its folder and why.

    A run's own doctor writes into a folder in the run's, which is `mismatch` in the trainer's output folder.
    """
    found, wrong = [], []
    for path, name in files_below(directory, DOCTOR_FILE):
        try:
            found.append(why_of(json.loads(path.read_text(encoding="utf-8")), name, path.resolve().parent))
        except ValidationError as error:
            wrong.append((name, f"{DOCTOR_FILE} is not one of the doctor's: {first_of(error)}"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            wrong.append((name, f"{DOCTOR_FILE} is not one of the doctor's: {error!r}"))
    return found, wrong


def files_below(directory: str | Path, file: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a name in a folder or below it, each with the name of its folder for a page."""
    places = ("", "*/", "*/*/", f"*/{RUN_FOLDER}/*/")
    root = Path(directory).resolve().parent
    for path in sorted(path for place in places for path in Path(directory).glob(f"{place}{file}")):
        folder = path.resolve().parent
        yield path, "/".join(part for part in folder.relative_to(root).parts if part != RUN_FOLDER) or folder.name


def why_of(data: Mapping[str, Any], name: str, folder: Path) -> Why:
    """Return what doctor.json says, in the form that the tables show; without `--model` it has neither parts nor causes."""
    # These import torch, which takes longer than a report, and most runs have no such file.
    from mismatch_ext.doctor.causes import HOSTS
    from mismatch_ext.doctor.evidence import LEAST_TOKENS
    from mismatch_ext.doctor.text import STATUS, TOO_FEW, experts

    _File.model_validate(data)
    gap, causes = data["gap"], data.get("causes", ())
    said = {cause["key"]: cause["said"] for cause in causes}
    about_experts = []
    if data.get("flips"):
        engine, rounding = data["flips"]
        about_experts.append(experts(engine, rounding, data.get("most_flips")))
    mean, k3 = quantity(gap["logp_abs_diff_mean"]), quantity(gap["k3_kl"])
    size = f"{mean} nats per token (k3 {k3}) on {data['tokens']:,} tokens of {data['responses']} responses"
    parts = [
        (said.get(part["name"], part["name"]), _share(part), quantity(part["mean"])) for part in data.get("parts", ())
    ]

    rows = []
    for cause in causes:
        share = "–" if cause["share"] is None else f"{cause['share']:.0%}"
        lines = [(host, cause["remedy"].get(host)) for host in HOSTS]
        rows.append((cause["said"], share, STATUS[cause["status"]], tuple(line for line in lines if line[1])))

    is_in_units = data.get("measurable") and data["verdict"] not in ("other_trainer", "trainer_alone")
    return Why(
        name=name,
        folder=folder,
        gap=size,
        mean=float(gap["logp_abs_diff_mean"]),
        parts=tuple(parts),
        about_parts=f"Parts of the gap. {TOO_FEW.capitalize()}." if data["tokens"] < LEAST_TOKENS else ADD_UP,
        causes=tuple(rows),
        notes=(*about_experts, *data["notes"], *data.get("hints", ())),
        verdict=data["verdict"],
        sentence=_sentence(data),
        rounding=data["ratio"] if is_in_units else None,
        confirmed=any(cause["status"] == "confirmed" for cause in causes),
    )


def _sentence(data: Mapping[str, Any]) -> str:
    from mismatch_ext.doctor.evidence import ROUTES
    from mismatch_ext.doctor.text import conclusion

    parts = data.get("parts", ()) if data.get("measurable") else ()
    routes = next((part["share"] for part in parts if part["name"] == ROUTES), None)
    above = data.get("conclusion") or conclusion(
        data["verdict"], data["unexplained"], data.get("seen", 0), data.get("longest", 0), routes
    )
    return str(above).replace(" above", " below")


def _share(part: Mapping[str, Any]) -> str:
    return "–" if part["share"] is None else f"{part['share']:.0%} ({part['low']:.0%} to {part['high']:.0%})"
