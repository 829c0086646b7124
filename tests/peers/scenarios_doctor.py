"""`mismatch-ext doctor` on the shipped dense model, twice in one process: a clean run, and one with a fault."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import json
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from mismatch_ext.adapters import cli

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from tests.readme import in_readme

RUNS: dict[str, list[str]] = {"clean": [], "fault": ["--sampling", "temperature=0.9"]}


def examined(out: str) -> dict[str, Any]:
    """Return the exit status, what was printed and doctor.json of each run."""
    prompts = Path(out) / "prompts.txt"
    prompts.write_text("\n".join(row["prompt"] for row in make_dataset(96, seed=5000)), encoding="utf-8")
    # As the README has it.
    command = (
        in_readme("mismatch-ext doctor").replace("PATH", str(FOLDER / "dense")).replace("prompts.txt", str(prompts))
    )
    less = ["--quick", "--responses", "96", "--engine-arg", "max_model_len=256"]
    found = {}
    for name, arguments in RUNS.items():
        folder = Path(out) / name
        # A file: vLLM asks standard output for its descriptor.
        log = Path(out) / f"{name}.txt"
        with log.open("w", encoding="utf-8") as printed, redirect_stdout(printed):
            asked = shlex.split(command.replace("runs/doctor", str(folder)))
            status = cli.main([*asked[1:], *less, *arguments])
        data = json.loads((folder / "doctor.json").read_text(encoding="utf-8"))
        found[name] = {"status": status, "printed": log.read_text(encoding="utf-8"), **data}
    return found
