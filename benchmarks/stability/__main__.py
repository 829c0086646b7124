"""Stability with controls: train every arm with several seeds, and print the table.

    python -m benchmarks.stability --out runs/stability --jobs 2
    python -m benchmarks.stability --out runs/stability --arms bypass matched --seeds 2
    python -m benchmarks.stability --real --out runs/stability_real
    python -m benchmarks.stability --page

The miniature's runs take 5 to 60 seconds each, and all of them about an hour on two cores. `--real` is TRL's GRPO in float32 with
vLLM in bf16, one to two minutes a run. Runs that are finished are not run again. `--record` keeps what was measured in
benchmarks/stability, from which `--page` writes evidence/stability.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.stability.arms import ARMS, EXPERTS, REAL
from benchmarks.stability.jobs import run_one
from benchmarks.stability.record import RECORDED, RECORDED_REAL, Runs, record
from benchmarks.stability.table import table, write_page


def read(folder: Path, names: list[str]) -> Runs:
    """Return the finished runs of a folder, by arm and seed."""
    runs: Runs = {}
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        runs.setdefault(run["arm"], {})[run["seed"]] = run["curves"]
    return {name: dict(sorted(runs[name].items())) for name in names if name in runs}


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/stability"))
    parser.add_argument("--real", action="store_true", help="TRL and vLLM")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="default: all")
    parser.add_argument("--seeds", type=int, default=0, help="of each arm; 0 for its own number")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a core each")
    parser.add_argument("--quick", action="store_true", help="the same code with little of everything: no figure")
    parser.add_argument("--record", action="store_true", help="keep what was measured")
    parser.add_argument(
        "--page", action="store_true", help="write evidence/stability.md from what is recorded, and run nothing"
    )
    args = parser.parse_args()
    if args.page:
        return write_page()
    every: dict[str, Any] = REAL if args.real else {**ARMS, **EXPERTS}
    arms = args.arms or list(every)
    if unknown := set(arms) - set(every):
        parser.error(f"no arm {sorted(unknown)}; there are {', '.join(every)}")
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    # An engine needs a process of its own; the miniature's processes keep the models that their runs start from.
    pool = ProcessPoolExecutor(
        args.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1 if args.real else None
    )
    with pool:
        jobs = []
        for seed in range(1, 1 + max(arm.seeds for arm in every.values())):
            for name in arms:
                out = args.out / f"{name.replace(' ', '_').replace(',', '')}-{seed}.json"
                if seed <= (args.seeds or every[name].seeds) and not out.exists():
                    jobs.append(pool.submit(run_one, name, seed, out, args.quick))
        for job in tqdm(as_completed(jobs), total=len(jobs), desc="runs", unit="run"):
            job.result()
    runs = read(args.out, list(every))
    print(table(runs))
    if args.record:
        record(runs, RECORDED_REAL if args.real else RECORDED)
        write_page()
    return None


if __name__ == "__main__":
    main()
