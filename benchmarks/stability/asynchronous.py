"""The same with TRL's AsyncGRPO: a trainer in float32 and a `vllm serve` in another dtype, whose rollouts are of older weights.

    python -m benchmarks.stability.asynchronous --model runs/async/model
    TRANSFER=mismatch_http examples/trl_server.sh serve runs/async/model --dtype bfloat16 --generation-config vllm
    python -m benchmarks.stability.asynchronous --model runs/async/model --out runs/async --server http://127.0.0.1:8000

The first command writes the checkpoint, published in bf16 as most are. The third runs the arms of the server's dtype,
one to three minutes a run on two cores, server and trainer; a server for each of float32, bfloat16 and float16 makes all eight.
`--record` keeps what was measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path

import requests

from benchmarks.stability.async_arms import ASYNC, table
from benchmarks.stability.page import write_page
from benchmarks.stability.record import RECORDED_ASYNC, record
from benchmarks.stability.runs import read, run_apart


def main() -> None:
    """Write the checkpoint, or run what is missing of a server's arms, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint's folder, as the server was given it")
    parser.add_argument("--server", help="address of a server; without one the checkpoint is written")
    parser.add_argument("--out", type=Path, default=Path("runs/stability_async"))
    parser.add_argument("--arms", nargs="+", default=[*ASYNC], choices=[*ASYNC], metavar="ARM")
    parser.add_argument("--seeds", type=int, default=0, help="of each arm; 0 for its own number")
    parser.add_argument("--record", action="store_true", help=f"keep what was measured in {RECORDED_ASYNC.name}")
    args = parser.parse_args()
    from benchmarks.stability import async_run  # not before it is needed: it imports TRL

    if args.server is None:
        async_run.checkpoint(args.model)
        return
    config = requests.get(f"{args.server}/server_info?config_format=json", timeout=60).json()["vllm_config"]
    dtype = config["model_config"]["dtype"].removeprefix("torch.")
    context = multiprocessing.get_context("spawn")
    for name in args.arms:
        for seed in range(1, 1 + (args.seeds or ASYNC[name].seeds)):
            if ASYNC[name].engine == dtype:
                run_apart(context, async_run.train, args.out, name, ASYNC[name], seed, args.model, args.server)
    runs = read(args.out, ASYNC)
    print(table(runs))
    if args.record:
        record(runs, RECORDED_ASYNC)
        write_page()


if __name__ == "__main__":
    main()
