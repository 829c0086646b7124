"""Runs the tests marked `numeric` as lesser machines would: `python -m tests.isa [NAME_PART] [-- PYTEST_ARGUMENTS]`.

A kernel chosen by the CPU rounds otherwise, packs otherwise or refuses. Each run limits oneDNN, torch and vLLM to the instruction
sets of one of the two machines next below this one, and says first what is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.cpu import lesser

ROOT = Path(__file__).resolve().parents[1]
SAY = """
import torch
from tests.cpu import has_amx, packs_linears
print("torch", torch.backends.cpu.get_cpu_capability(), "| AMX", has_amx(), "| vLLM packs linear layers of",
      *(str(d).removeprefix("torch.") for d in (torch.float32, torch.bfloat16, torch.float16) if packs_linears(d)), flush=True)
"""


def main(arguments: list[str]) -> int:
    """Run the tests once per machine.

    Args:
        arguments: Part of a machine's name, or none for all, and after `--` what pytest gets.

    Returns:
        0 when every run passed, else another number; also for a name that no machine has.
    """
    split = arguments.index("--") if "--" in arguments else len(arguments)
    wanted, rest = " ".join(arguments[:split]), arguments[split + 1 :]
    below = lesser()
    machines = {name: limits for name, limits in below.items() if wanted in name}
    if not machines:
        print(f"{wanted!r} is part of no machine's name; below this one are: {', '.join(below)}.", file=sys.stderr)
        return 2
    failed = []
    for name, limits in machines.items():
        path = os.pathsep.join(filter(None, [str(ROOT / "tests/lesser_cpu"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **limits, "PYTHONPATH": path}
        print(f"\n{name}: {' '.join(f'{k}={v}' for k, v in limits.items())}", flush=True)
        subprocess.run([sys.executable, "-c", SAY], cwd=ROOT, env=environment, check=True)
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "numeric", "tests/unit", "tests/peers", *rest]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            failed.append(name)
        print(f"{name}: {'failed' if name in failed else 'passed'} in {time.monotonic() - start:.0f} s", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
