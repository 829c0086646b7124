"""verl's own trainer on two CPU cores: two steps of GRPO with vLLM on a small model, and the `mismatch` config.

    python -m examples.verl_cpu +mismatch.precision.dtype=float32

Arguments are verl's overrides; without any, the gap is measured and nothing changes. What verl needs on a CPU (a device, a vLLM
server without a GPU, prompts of the arithmetic task) is what this repository's tests of verl use: `tests/peers/verl/main_ppo.py`.
On GPUs, use `examples/verl_grpo.sh`.
"""

from __future__ import annotations

import shutil
import sys

from tests.peers.verl.main_ppo import ROOT, lasting, run_verl

WORK = ROOT / "runs/verl_cpu"
MODEL = ROOT / "examples/arithmetic/models/dense"
STEPS = 2


def main() -> None:
    """Run verl, and print what each step logged of the mismatch."""
    shutil.rmtree(WORK, ignore_errors=True)
    overrides = sys.argv[1:] or ["+mismatch.monitor={}"]
    print(
        f"verl starts Ray, a vLLM server and an FSDP2 actor: two to three minutes. Its output: {WORK}/log.txt",
        flush=True,
    )
    run = run_verl(WORK, [*lasting(STEPS), *overrides], model=MODEL, plugin=True, metrics="short")
    if run.code:
        sys.exit(f"{run.log[-3000:]}\nverl ended with exit status {run.code}; its whole output is {WORK}/log.txt")
    for number, step in enumerate(run.steps, start=1):
        shown = {name: value for name, value in step.items() if name.startswith("mismatch/")}
        print(
            f"step {number}: "
            + ", ".join(f"{name.removeprefix('mismatch/')} {value:.2e}" for name, value in shown.items())
        )
    print(f"mismatch-ext report {(WORK / 'checkpoints/mismatch')}")


if __name__ == "__main__":
    main()
