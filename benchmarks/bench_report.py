"""Times reading a long run for its report against only parsing its lines as JSON."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import paired
from mismatch_ext.log import RunStream
from mismatch_ext.log_reading import read_run
from mismatch_ext.names import MEASURES

STEPS = 20_000


def write(run_dir: Path) -> Path:
    """Write a run that logs every measure of the table of metrics, and reward and loss."""
    rng = random.Random(0)
    names = ["reward", "loss", *(f"mismatch/{name}" for name in MEASURES), "mismatch/tokens", "mismatch/sequences"]
    stream = RunStream.open(run_dir, header={"run": {"name": "long"}})
    for step in range(1, STEPS + 1):
        stream.step(step, {name: rng.random() for name in names})
    stream.close()
    return run_dir


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder, "run"))

        def parsed() -> int:
            with (path / "metrics.jsonl").open("rb") as lines:
                return sum(json.loads(line)["kind"] == "step" for line in lines)

        def read() -> int:
            return len(read_run(path).steps)

        assert read() == parsed() == STEPS
        name = f"a run of {STEPS:,} steps read for its report, against parsing its lines alone"
        return [paired(name, read, parsed, equal="the number of steps", repeats=5)]
