"""Run benchmarks and print one JSON object per line: `python -m benchmarks` runs all, `python -m benchmarks kl_full` one."""

from __future__ import annotations

import importlib
import json
import sys

from tqdm import tqdm

NAMES = (
    "metrics",
    "precision",
    "correction",
    "kl_full",
    "routing",
    "sampling_mask",
    "replay",
    "report",
    "doctor",
    "verl_scale",
    "trl_server",
    "trl_step",
)

if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(NAMES):
        raise SystemExit(f"no benchmark {sorted(unknown)}; there are {', '.join(NAMES)}")
    # The progress bar goes to standard error, so that standard output holds only JSON lines.
    for name in tqdm(sys.argv[1:] or NAMES, desc="benchmarks", file=sys.stderr):
        for row in importlib.import_module(f"benchmarks.bench_{name}").run():
            print(json.dumps(row), flush=True)
