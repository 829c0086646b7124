"""Processor time of `mismatch-ext report` on logs of 500 and of 5,000 steps, beside that of importing its libraries.

python -m benchmarks report
"""

from __future__ import annotations

import json
import math
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from mismatch_ext.names import MEASURES, PREFIX

LENGTHS = (500, 5_000)
LAYERS = 24
"""Layers of a mixture of experts, which each log one metric."""
REPEATS = 3
LIBRARIES = "import jinja2, numpy, plotly.graph_objects, pydantic"


def run() -> Iterator[dict[str, Any]]:
    """Yield seconds of processor time, the median of a few processes each."""
    libraries = _processor_seconds([sys.executable, "-c", LIBRARIES])
    yield {"what": LIBRARIES, "seconds": libraries}
    for steps in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            _write_log(Path(folder), steps)
            seconds = _processor_seconds([sys.executable, "-m", "mismatch_ext", "report", folder])
        yield {
            "what": f"report of {steps} steps",
            "seconds": seconds,
            "times_the_libraries": round(seconds / libraries, 2),
        }


def _processor_seconds(command: list[str]) -> float:
    taken = []
    for _ in range(REPEATS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(median(taken), 3)


def _write_log(folder: Path, steps: int) -> None:
    """Write what a run of a mixture of experts logs, with made-up figures."""
    draw = random.Random(0)
    gaps = [PREFIX + name for name in MEASURES]
    layers = [f"{PREFIX}routing/layer_{layer}_set_mismatch" for layer in range(LAYERS)]
    host = ("reward", "loss", "grad_norm", "entropy", "completions/mean_length")
    header = {"kind": "header", "segment": 0, "schema": 1, "of": "training", "run": {"name": "made up", "host": "trl"}}
    with (folder / "metrics-000.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for step in range(1, steps + 1):
            metrics = {name: 1e-3 * math.exp(draw.gauss(0.0, 0.3)) for name in (*gaps, *layers, *host)}
            metrics[PREFIX + "tokens"] = 1000.0
            line = {"kind": "step", "segment": 0, "step": step, "split": "train", "metrics": metrics}
            file.write(json.dumps(line) + "\n")
