"""Reads what people paste of a run: the console text of TRL, verl, slime and prime-rl, and the CSV that W&B exports.

To add a console's form, add a `Form` to `FORMS`, and the names of its metrics to `[logs]` in names.toml.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mismatch_ext.names import EVALUATION

COLOR = re.compile(r"\x1b\[[\d;]*m")
IN_DICT = re.compile(r"'([^']+)': '?(?:np\.\w+\()?([^\s,')}]+)")
STEP_COLUMNS = ("Step", "_step", "global_step", "train/global_step", "training/global_step", "trainer/global_step")
EDGES = ("__MIN", "__MAX")
"""How W&B ends the names of columns with the smallest and the largest value of what it averaged."""

Row = tuple[str, int, str, dict[str, float]]
"""Its place in the log, step, split and metrics."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a framework's console shows the metrics of a step.

    Attributes:
        host: The framework.
        line: Finds `metrics` in a line, and `step` where it is there.
        metric: Finds names and values in what `metrics` is.
    """

    host: str
    line: re.Pattern[str]
    metric: re.Pattern[str]


FORMS = (
    # verl/utils/logger/aggregate_logger.py
    Form(
        host="verl",
        line=re.compile(r"\bstep:(?P<step>\d+) - (?P<metrics>.+)"),
        metric=re.compile(r"([^\s:]+):'?(?:np\.\w+\()?([^\s)]+)"),
    ),
    # src/prime_rl/trainer/rl/train.py (PrimeIntellect-ai/prime-rl); releases before had a colon behind each name.
    Form(
        host="prime-rl",
        line=re.compile(r"\bStep (?P<step>\d+) \| (?P<metrics>.+)"),
        metric=re.compile(r"(?:^|\| )([A-Z][\w. ]*?):? ((?:[-+]?\d|nan|-?inf)\S*)"),
    ),
    # slime/backends/megatron_utils/model.py and slime/ray/rollout.py (THUDM/slime)
    Form(
        host="slime",
        line=re.compile(r"\b(?:step|rollout|perf) (?P<step>\d+): (?P<metrics>\{.+)"),
        metric=IN_DICT,
    ),
    # transformers/trainer_callback.py; its fifth release prints numbers as text.
    Form(host="TRL", line=re.compile(r"(?P<metrics>\{'.*'epoch': .*\})"), metric=IN_DICT),
)


def of_console(text: str) -> tuple[str, list[Row]] | None:
    """Return the framework whose console wrote a text, and the metrics in it; None if it has none.

    Where lines name no step, the steps are the numbers of the lines.
    """
    # A progress bar ends its line with a carriage return.
    lines = COLOR.sub("", text).splitlines()
    found = {form.host: list(_rows(form, lines)) for form in FORMS}
    host = max(found, key=lambda name: len(found[name]))
    return (host, found[host]) if found[host] else None


def _rows(form: Form, lines: list[str]) -> Iterator[Row]:
    step = 0
    for number, line in enumerate(lines, start=1):
        match = form.line.search(line)
        if match is None or "'train_runtime'" in line:
            continue
        metrics = _numbers(form.metric.findall(match["metrics"]))
        evaluation = {
            name.removeprefix(EVALUATION): value for name, value in metrics.items() if name.startswith(EVALUATION)
        }
        if "step" in match.groupdict():
            step = int(match["step"])
        elif not evaluation:
            step += 1
        if evaluation:
            yield f"line {number}", step, "eval/eval", evaluation
        elif metrics:
            yield f"line {number}", step, "train", metrics


def _numbers(pairs: list[tuple[str, str]]) -> dict[str, float]:
    numbers = {}
    for name, value in pairs:
        try:
            numbers[name] = float(value)
        except ValueError:
            continue  # a text, or a number with its unit
    return numbers


def of_wandb(text: str) -> dict[str, list[Row]]:
    """Return the metrics of each run in a CSV that W&B exports of a chart ("run - metric") or of a run; raises ValueError."""
    header, *table = list(csv.reader(text.splitlines())) or [[]]
    step_column = next((name for name in header if name in STEP_COLUMNS), None)
    if step_column is None:
        raise ValueError(f"no column is named {' or '.join(STEP_COLUMNS)}")
    runs: dict[str, list[Row]] = {}
    for number, cells in enumerate(table, start=2):
        values = _numbers(list(zip(header, cells, strict=False)))
        step = values.pop(step_column, None)
        if step is None:
            continue
        for column, value in values.items():
            run, _, metric = column.rpartition(" - ")
            if not column.endswith(EDGES):
                runs.setdefault(run, []).append((f"line {number}", int(step), "train", {metric: value}))
    return runs
