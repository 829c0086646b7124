"""What `mismatch-ext doctor --quick` says of a real model, and what that costs.

    python -m benchmarks.doctor                                        # four cases in float32, a process each
    python -m benchmarks.doctor --dtype bfloat16 --record FILE         # writes what was printed, with machine and versions

SmolLM2-135M-Instruct (tied head, 49,152 tokens), a chat prompt per response. In the first case both sides agree; in the others
the engine samples at another temperature, cuts off a tail, or has other weights: the trainer's before a step that moved each
by a hundredth of its tensor's standard deviation. Processor seconds and memory are those of the doctor's process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness import measured_on

CASES: dict[str, Sequence[str]] = {
    "clean": (),
    "temperature 0.94": ("--sampling", "temperature=0.94", "--temperature", "1"),
    "top_p 0.95": ("--sampling", "top_p=0.95"),
    "weights of one step earlier": ("--engine-model", "{older}"),
}
STEP = 0.01
"""Standard deviation of a step, as a share of the tensor's own."""
PROMPTS = Path(__file__).resolve().parents[1] / "examples/doctor/prompts.jsonl"


def step(model: Path, folder: Path) -> None:
    """Write a checkpoint whose weights are a random step away from a model's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    stepped = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in stepped.parameters():
            parameter.add_(torch.randn_like(parameter) * STEP * parameter.std())
    stepped.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def examine(model: Path, dtype: str, options: Sequence[str], out: Path) -> dict[str, Any]:
    """Run the doctor as a user does, and return its verdict, its causes and what it cost."""
    command = [
        sys.executable, "-m", "mismatch_ext", "doctor", "--quick", "--model", str(model), "--dtype", dtype,
        "--prompts", str(PROMPTS), "--engine-arg", "max_model_len=512", "--out", str(out), *options,
    ]  # fmt: skip
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    answer = out / "doctor.json"
    if not answer.is_file():
        raise SystemExit(f"the doctor wrote no answer (status {status}):\n{said[-2000:]}")
    found: Mapping[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return {
        "verdict": found["verdict"],
        "causes": {cause["key"]: cause["parameter"] for cause in found["causes"]},
        "tokens": found["tokens"],
        "gap": found["gap"],
        "seconds": time.perf_counter() - began,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_gigabytes": usage.ru_maxrss / 2**20,
        "seconds_by_part": found["seconds"],
    }


def main() -> None:
    """Examine each case and print a row of it."""
    from examples.smollm2 import unpack

    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor", description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), metavar="CASE")
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    model = unpack()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / "older"
        if any("{older}" in option for case in given.cases for option in CASES[case]):
            step(model, older)
        for case in tqdm(given.cases, desc="doctor"):
            out = Path(folder) / "out"
            shutil.rmtree(out, ignore_errors=True)
            options = [option.format(older=older) for option in CASES[case]]
            rows.append({"case": case, "dtype": given.dtype, **examine(model, given.dtype, options, out)})
            print(json.dumps(rows[-1]), flush=True)
    if given.record:
        records = json.loads(given.record.read_text(encoding="utf-8")) if given.record.exists() else []
        command = f"python -m benchmarks.doctor --dtype {given.dtype}"
        kept = [record for record in records if record["command"] != command]
        kept.append({"command": command, **measured_on(), "figures": rows})
        given.record.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
