"""verl's own trainer on two CPU cores: two steps of GRPO with vLLM on a small model, and the `mismatch` config.

    python -m examples.verl_cpu +mismatch.precision.dtype=float32

Arguments are verl's overrides; without any, the gap is measured and nothing changes. The run is ended after half an hour.
What verl needs on a CPU (a device, a vLLM server without a GPU, prompts of the arithmetic task) is what this repository's tests
of verl use: `tests/peers/verl/main_ppo.py`. On GPUs, use `examples/verl_grpo.sh`.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys

from tests.peers.verl.main_ppo import ROOT, TIMED_OUT, lasting, run_verl

WORK = ROOT / "runs/verl_cpu"
MODEL = ROOT / "examples/arithmetic/models/dense"
STEPS = 2
LIMIT = 1800
"""Seconds after which a run is ended; two free cores take two to three minutes, busy ones far longer."""


def main() -> None:
    """Run verl, and print what each step logged of the mismatch."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m examples.verl_cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="overrides of verl's main_ppo (default: +mismatch.monitor={})")
    overrides = parser.parse_args().overrides or ["+mismatch.monitor={}"]
    WORK.parent.mkdir(exist_ok=True)
    with WORK.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run of this example is using {WORK}; wait until it ends")
        shutil.rmtree(WORK, ignore_errors=True)
        _run(overrides)


def _run(overrides: list[str]) -> None:
    print(
        "verl starts Ray, a vLLM server and an FSDP2 actor: two to three minutes on two free cores, at most "
        f"{LIMIT // 60}. Its output: {WORK}/log.txt",
        flush=True,
    )
    named = [f"trainer.project_name={WORK.parent.name}", f"trainer.experiment_name={WORK.name}"]
    run = run_verl(
        WORK, [*lasting(STEPS), *named, *overrides], model=MODEL, plugin=True, timeout=LIMIT, metrics="short"
    )
    if run.code:
        why = f"exit status {run.code}" + (
            f", because {LIMIT // 60} minutes were over" if run.code == TIMED_OUT else ""
        )
        sys.exit(f"{run.log[-3000:]}\nverl ended with {why}; its whole output is {WORK}/log.txt")
    for number, step in enumerate(run.steps, start=1):
        shown = {name: value for name, value in step.items() if name.startswith("mismatch/")}
        print(
            f"step {number}: "
            + ", ".join(f"{name.removeprefix('mismatch/')} {value:.2e}" for name, value in shown.items())
        )
    print(f"mismatch-ext report {(WORK / 'checkpoints/mismatch')}")


if __name__ == "__main__":
    main()
