"""Run every benchmark and print one JSON object per line: `python -m benchmarks`."""

from __future__ import annotations

import json
import sys

from tqdm import tqdm

from benchmarks import (
    bench_correction,
    bench_doctor,
    bench_kl_full,
    bench_metrics,
    bench_precision,
    bench_replay,
    bench_report,
    bench_routing,
    bench_sampling_mask,
    bench_sampling_mask_step,
    bench_trl_server,
    bench_trl_step,
    bench_verl_scale,
)

MODULES = (
    bench_metrics,
    bench_precision,
    bench_correction,
    bench_kl_full,
    bench_routing,
    bench_sampling_mask,
    bench_sampling_mask_step,
    bench_replay,
    bench_report,
    bench_doctor,
    bench_verl_scale,
    bench_trl_server,
    bench_trl_step,
)

if __name__ == "__main__":
    # The progress bar goes to standard error, so that standard output holds only JSON lines.
    for module in tqdm(MODULES, desc="benchmarks", file=sys.stderr):
        for row in module.run():
            print(json.dumps(row), flush=True)
