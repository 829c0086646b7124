"""Stability with controls, in miniature: train every arm with several seeds, and print the table.

    python -m benchmarks.stability --out runs/stability --jobs 2
    python -m benchmarks.stability --out runs/stability --arms bypass matched --seeds 2
    python -m benchmarks.stability --page

Models of transformers on a CPU, 5 to 60 seconds a run and about an hour for all on two cores. Runs that are finished are not run
again. `--record` keeps what was measured in benchmarks/stability/recorded.json, from which `--page` writes docs/stability.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from pathlib import Path

from tqdm import tqdm

from benchmarks.stability.arms import ARMS, EXPERTS
from benchmarks.stability.jobs import Job, run_one
from benchmarks.stability.record import RECORDED, Runs, record
from benchmarks.stability.table import table, write_page


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Return the runs that are not finished, arms of many seeds first."""
    every = {**ARMS, **EXPERTS}
    found = []
    for seed in range(1, 1 + max(arm.seeds for arm in every.values())):
        for name in args.arms:
            if seed > (args.seeds or every[name].seeds):
                continue
            out = args.out / f"{name.replace(' ', '_').replace(',', '')}-{seed}.json"
            if not out.exists():
                found.append((name, seed, out, args.quick))
    return found


def read(folder: Path) -> Runs:
    """Return the finished runs of a folder, by arm and seed."""
    runs: Runs = {}
    for file in sorted(folder.glob("*.json")):
        one = json.loads(file.read_text(encoding="utf-8"))
        runs.setdefault(one["arm"], {})[one["seed"]] = one["curves"]
    return {name: dict(sorted(runs[name].items())) for name in (*ARMS, *EXPERTS) if name in runs}


def main() -> None:
    """Run what is missing, and print the table."""
    said = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=said[0])
    parser.add_argument("--out", type=Path, default=Path("runs/stability"))
    parser.add_argument("--arms", nargs="+", default=[*ARMS, *EXPERTS], choices=[*ARMS, *EXPERTS], metavar="ARM")
    parser.add_argument("--seeds", type=int, default=0, help="of each arm; 0 for its own number")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a core each")
    parser.add_argument("--quick", action="store_true", help="the same code with little of everything: no figure")
    parser.add_argument("--record", action="store_true", help=f"keep what was measured in {RECORDED.name}")
    parser.add_argument(
        "--page", action="store_true", help="write docs/stability.md from what is recorded, and run nothing"
    )
    args = parser.parse_args()
    if args.page:
        write_page()
        return
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(args)
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for _ in tqdm(pool.imap_unordered(run_one, jobs), total=len(jobs), desc="runs", unit="run"):
            pass
    runs = read(args.out)
    print(table(runs))
    if args.record:
        record(runs)
        write_page()


if __name__ == "__main__":
    main()
