"""The same on the real trainer and engine: TRL's GRPO in float32 and vLLM in bf16, whose weights are rounded at each update.

    python -m benchmarks.stability.real --out runs/stability_real

vLLM on a CPU runs no int4: each update sends weights that were rounded to that grid, as an engine that stores int4 would hold
them. Model, language, reward and figures are the miniature's. One to two minutes a run, 15 runs. `--record` keeps what was
measured, with what the miniature's file holds already.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
from pathlib import Path

from tqdm import tqdm

from benchmarks.stability.arms import REAL
from benchmarks.stability.page import write_page
from benchmarks.stability.record import RECORDED_REAL, Runs, record
from benchmarks.stability.table import table


def read(folder: Path) -> Runs:
    """Return the finished runs of a folder, by arm and seed."""
    runs: Runs = {}
    for file in sorted(folder.glob("*/run.json")):
        one = json.loads(file.read_text(encoding="utf-8"))
        runs.setdefault(one["arm"], {})[one["seed"]] = one["curves"]
    return {name: dict(sorted(runs[name].items())) for name in REAL if name in runs}


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
        out = args.out / f"{name.replace(' ', '_')}-{seed}"
        bar.set_postfix_str(out.name)
        if (out / "run.json").is_file():
            continue
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        process = context.Process(target=real_run.train_quietly, args=(name, REAL[name], seed, out))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{out.name} ended with exit code {process.exitcode}; see {out / 'log.txt'}")
    runs = read(args.out)
    print(table(runs))
    if args.record:
        record(runs, RECORDED_REAL)
        write_page()


if __name__ == "__main__":
    main()
