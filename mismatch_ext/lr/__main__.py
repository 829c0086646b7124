"""Print what a surge detector makes of simulated lengths: `python -m mismatch_ext.lr '{"ratio": 1.5}'`."""

from __future__ import annotations

import argparse

from mismatch_ext.config import SurgeConfig
from mismatch_ext.loading import load_mapping
from mismatch_ext.lr.simulation import table
from mismatch_ext.strict import build

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m mismatch_ext.lr", description=__doc__)
    parser.add_argument("surge", nargs="?", default="{}", help="settings of `mismatch.lr.surge`, JSON or YAML")
    parser.add_argument("--seeds", type=int, default=200, help="runs per curve")
    parser.add_argument("--steps", type=int, default=1000, help="batches per run")
    given = parser.parse_args()
    config = build(SurgeConfig, load_mapping(given.surge), "mismatch.lr.surge")
    print(f"{given.seeds} runs of {given.steps} batches each, {config}\n")
    print(table(config, seeds=given.seeds, steps=given.steps))
