"""The same on the real trainer and engine: TRL's GRPO in float32 and vLLM in bf16, whose weights are rounded at each update.

    python -m benchmarks.stability.real --out runs/stability_real

vLLM on a CPU runs no int4: each update sends weights that were rounded to that grid, as an engine that stores int4 would hold
them. Model, language, reward and figures are the miniature's. One to two minutes a run, 15 runs. `--record` keeps what was
measured, with what the miniature's file holds already.
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path

from tqdm import tqdm

from benchmarks.stability.arms import REAL
from benchmarks.stability.record import RECORDED_REAL, record
from benchmarks.stability.runs import read, run_apart
from benchmarks.stability.table import table, write_page


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/stability_real"))
    parser.add_argument("--arms", nargs="+", default=[*REAL], choices=[*REAL], metavar="ARM")
    parser.add_argument("--seeds", type=int, default=0, help="of each arm; 0 for its own number")
    parser.add_argument("--record", action="store_true", help=f"keep what was measured in {RECORDED_REAL.name}")
    args = parser.parse_args()
    from benchmarks.stability import real_run  # not before it is needed: it imports vLLM

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.stability.real_run"])
    jobs = [(name, seed) for seed in range(1, 6) for name in args.arms if seed <= (args.seeds or REAL[name].seeds)]
    bar = tqdm(jobs, desc="runs", unit="run")
    for name, seed in bar:
        bar.set_postfix_str(f"{name}, seed {seed}")
        run_apart(context, real_run.train, args.out, name, REAL[name], seed)
    runs = read(args.out, REAL)
    print(table(runs))
    if args.record:
        record(runs, RECORDED_REAL)
        write_page()


if __name__ == "__main__":
    main()
