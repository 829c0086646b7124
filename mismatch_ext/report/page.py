"""One self-contained HTML file from one or several run directories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from mismatch_ext.chains.turns import TURNS_FILE
from mismatch_ext.closing import FailedTimes, bad_rows, failed_checks, only_measured, too_many_bad_rows
from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.files import write_whole
from mismatch_ext.host_logs import EVENTS
from mismatch_ext.log_reading import DOCTOR_FILE, RunData, segment_files
from mismatch_ext.names import MEANING, PREFIX
from mismatch_ext.report import tables
from mismatch_ext.report.doctor import Why, read_why
from mismatch_ext.report.figures import plotly_js, sections, style
from mismatch_ext.report.judging import RunVerdict, judge_all
from mismatch_ext.report.levels import WORDS
from mismatch_ext.report.sentences import verdict
from mismatch_ext.report.summary import Summary, load_runs, summarize
from mismatch_ext.report.turns import BrokenTurns, read_turns
from mismatch_ext.versions import installed
from mismatch_ext.words import quantity

MAX_TITLE_RUNS = 4
TEMPLATE = "template.html.j2"
REPORT_FILE = "report.html"
LABELS = {
    "logp_abs_diff_mean": "mean |Δlogp|",
    "logp_abs_diff_max": "max |Δlogp|",
    "kl": "k1",
    "k3_kl": "k3",
    "seq_kl": "seq KL",
    "seq_k3_kl": "seq k3",
    "ess_token": "ESS token",
    "ess_seq": "ESS seq",
    "routing/set_mismatch_frac": "other experts",
    "native/k3_kl": "k3 without replay",
}
MEANINGS = MEANING | {"native/k3_kl": f"{MEANING['k3_kl']}, of the batches that were also scored without replay"}
STATUS_LABELS = {
    "completed": ", completed",
    "failed": ", ended with an error",
    "interrupted": ", interrupted",
    "open": ", no end line",
    "unknown": "",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rendered report: where it is, its verdict in words and by run, its numbers, and what could not be used."""

    path: Path
    verdict: str
    judged: tuple[RunVerdict, ...]
    summary: Summary
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what `mismatch-ext report --json` prints."""
        return {
            "report": str(self.path),
            "verdict": self.verdict,
            "runs": {run.run: asdict(run) for run in self.judged},
            "rows": [asdict(row) for row in self.summary.rows],
            "problems": list(self.problems),
        }


def build(run_dir: str | Path, out: str | Path | None = None) -> Report:
    """Render the report of a run directory, a folder of run directories side by side, or a log that TRL or verl wrote.

    The file loads nothing from the network. Unless `out` names another, it is `report.html` in that folder, or for a log of TRL
    or verl the log's name, without TensorBoard's prefix, with `.html`. Raises RunDirectoryError if there is no run or the file
    cannot be written, PeerVersionError if plotly is not installed.
    """
    script, template = plotly_js(), _template(TEMPLATE)
    runs = load_runs(run_dir)
    summary = summarize(runs)
    why, unread = read_why(run_dir)
    turns, unread_turns = read_turns(run_dir)
    judged = judge_all(runs, summary, why)
    sentence = verdict(judged, runs, why)
    path = _default(Path(run_dir), runs) if out is None else Path(out)
    page = template.render(
        title=_title(run_dir, runs),
        verdict=sentence,
        # Inline, one copy for all plots, because the file must work without a network.
        plotly_js=script,
        why=why,
        turns=turns,
        **_context(runs, summary, judged, [*unread, *unread_turns]),
    )
    _write(path, page)
    problems = tuple(problem for run in runs.values() for problem in run.problems)
    return Report(path=path, verdict=sentence, judged=judged, summary=summary, problems=problems)


def _default(source: Path, runs: Mapping[str, RunData]) -> Path:
    if source.is_dir():
        return source / REPORT_FILE
    # A folder may hold many logs, but one run of ours.
    logs = [run.source for run in runs.values() if run.is_host_log]
    # A page whose name has TensorBoard's prefix would be read as one more event file.
    return source.with_name(f"{logs[0].removeprefix(EVENTS.rstrip('*'))}.html" if logs else REPORT_FILE)


def build_why(directory: str | Path) -> Path:
    """Render what doctor.json and turns.json say: in the report if the folder is a run's, otherwise as a separate page."""
    folder = Path(directory)
    if folder.is_dir() and segment_files(folder):
        return build(folder).path
    why, unread = read_why(folder)
    turns, unread_turns = read_turns(folder)
    if not why and not turns:
        reasons = "".join(f"; {said}" for _, said in [*unread, *unread_turns])
        raise RunDirectoryError(f"{folder}: no {DOCTOR_FILE} and no {TURNS_FILE} that can be read{reasons}.")
    page = _template("doctor.html.j2").render(
        title=folder.resolve().name, why=why[:1], turns=turns[:1], verdicts=_verdicts(why[:1], turns[:1]), **_made()
    )
    path = folder / REPORT_FILE
    _write(path, page)
    return path


LEVELS = {
    "clean": "same",
    "explained": "elevated",
    "partly": "large",
    "unexplained": "large",
    "other_trainer": "large",
    "trainer_alone": "large",
    "within the threshold": "small",
}
"""Colors of the doctor's verdicts."""


def _verdicts(why: Sequence[Why], turns: Sequence[BrokenTurns]) -> list[tuple[str, str]]:
    """Return the color and the sentence of each verdict on a separate page."""
    about_sides = [(LEVELS[found.verdict], found.sentence) for found in why]
    return about_sides + [(found.level, found.sentence) for found in turns]


def build_demo(folder: Path, about: str, bars: Mapping[str, float], command: str) -> Path:
    """Render what the demo showed, without plotly; `bars` are mean |Δlogp| in nats per token."""
    # On an axis of at least one decade, below the least gap; a gap of 0, which has no logarithm, is at its left end.
    seen = [value for value in bars.values() if value > 0] or [1.0]
    low = math.ceil(math.log10(min(seen))) - 1
    high = max(low + 1, math.ceil(math.log10(max(seen))))

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low) if value > 0 else 0.0

    decades = [(f"1e{power}", (power - low) / (high - low)) for power in range(low, high + 1)]
    page = _template("demo.html.j2").render(
        about=about,
        command=command,
        bars=[(name, quantity(value), place(value)) for name, value in bars.items()],
        decades=decades,
        why=read_why(folder)[0],
        **_made(),
    )
    path = folder / REPORT_FILE
    _write(path, page)
    return path


def _made() -> dict[str, str]:
    return {
        "generated": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "release": installed("mismatch-ext") or "from source",
    }


def _template(name: str) -> Any:
    folder = resources.files("mismatch_ext.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda part: folder.joinpath(part).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quantity"] = quantity
    return environment.get_template(name)


def _title(run_dir: str | Path, runs: Mapping[str, RunData]) -> str:
    """Return the runs' names, or the folder's if they are many."""
    return ", ".join(runs) if len(runs) <= MAX_TITLE_RUNS else f"{Path(run_dir).resolve().name}, {len(runs)} runs"


def _context(
    runs: Mapping[str, RunData],
    summary: Summary,
    judged: Sequence[RunVerdict],
    unread: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    cards = [_card(verdict, index, runs[verdict.run], summary) for index, verdict in enumerate(judged)]
    sources = sorted({run.source for run in runs.values()})
    evaluations = sorted({split for run in runs.values() for split in run.splits if split != "train"})
    bad = [(name, bad_rows(run), too_many_bad_rows(run)) for name, run in runs.items()]
    events, events_left_out = tables.event_rows(runs)
    overview = {
        "runs": cards,
        "sources": ", ".join(sources),
        "summary": summary,
        "columns": [_column(name) for name in summary.columns],
        "missing": [*tables.missing(runs, summary), *unread],
    }
    plots = {"sections": sections(runs), "splits": evaluations}
    details = {
        "side_rows": tables.side_rows(runs),
        "setting_tables": tables.setting_tables(runs),
        "patch_rows": tables.patch_rows(runs),
        "config_texts": tables.config_texts(runs),
    }
    happened = {
        "checks": _checks(runs),
        "bad_rows": [row for row in bad if row[1]],
        "events": events,
        "events_left_out": events_left_out,
    }
    return _made() | overview | plots | details | happened


def _card(judged: RunVerdict, index: int, run: RunData, summary: Summary) -> dict[str, Any]:
    """Return what the first table says of a run."""
    status = STATUS_LABELS[judged.status]
    if judged.ended == "evaluation":
        status = status.replace(", ", ", evaluation ")
    figure = "k3_kl" if judged.mean is None else "logp_abs_diff_mean"
    steps, _ = run.series(PREFIX + figure, judged.split)
    return {
        "name": judged.run,
        "judged": judged,
        "level": WORDS[judged.level][0],
        "status": status,
        "row": summary.row(judged.run, judged.split),
        "logs": len(steps),
        "resumed": bool(run.resumes),
        **style(index),
    }


def _checks(runs: Mapping[str, RunData]) -> list[tuple[str, bool, list[FailedTimes]]]:
    """Return the failed checks of each run that has some, or whose config only measures."""
    rows = []
    for name, run in runs.items():
        failed, measures = failed_checks(run), only_measured(run)
        if failed or measures:
            rows.append((name, measures, failed))
    return rows


def _column(name: str) -> tuple[str, str, str]:
    """Return the name of a column, its label and its meaning."""
    part, _, plain = name.rpartition("/")
    label = LABELS.get(name) or f"{part} {LABELS.get(plain, plain)}".strip()
    return name, label, MEANINGS.get(name) or MEANING[plain]


def _write(path: Path, page: str) -> None:
    # JSON may carry lone surrogates, which no file encoding has.
    write_whole(path, page.encode("utf-8", "replace"))
