"""What `mismatch-ext doctor --quick` and `gate --quick` say of a real model, and what that costs.

    python -m benchmarks.doctor                                     # the doctor on a clean pair and six faults, and the gate
    python -m benchmarks.doctor --only 'doctor clean' gate          # rows whose names begin so
    python -m benchmarks.doctor --record evidence/doctor_real.json  # keeps each row, with machine and versions
    python -m benchmarks.doctor growth                              # time and memory by tokens and by vocabulary

SmolLM2-135M-Instruct (tied head, 49,152 tokens), chat prompts. In the first case both sides agree. In the others the engine
samples at another temperature, cuts off a tail, has one more sentence in its system prompt, another `rope_theta`, weights in
int8, or older weights: the trainer's before a step that moved each by a hundredth of its tensor's standard deviation. The gate
has both sides in float32, float16 and bfloat16, clean and with that temperature. Each row is a process of its own: seconds of
wall and of the processor, the largest resident size, the seconds until the first line with figures, and the load before and
after. `growth` fits made-up logits.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import measured_on

STEP = 0.01
"""Standard deviation of a step, as a share of the tensor's own."""
THETA = 1.13
"""Factor on `rope_theta`."""
FORMS = (
    "Write a short story about {}.",
    "List facts about {}.",
    "Explain {} to a child.",
    "Describe {} in a few sentences.",
)
SUBJECTS = ("a whale", "rivers", "the moon", "bread", "a castle", "trains", "the sea", "a garden")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
SENTENCE = " Answer as a teacher would."
DTYPES = ("float32", "float16", "bfloat16")
FIRST_LINE = "first look"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: the command, and how its engine differs.

    Args:
        command: "doctor" or "gate".
        dtype: Compute dtype of both sides.
        options: More options of the command.
        engine: Writes the engine's checkpoint into the second folder from that in the first; None if both sides have one.
        sentence: Whether the engine's system prompt has one sentence more.
    """

    command: str = "doctor"
    dtype: str = "float32"
    options: Sequence[str] = ()
    engine: Callable[[Path, Path], None] | None = None
    sentence: bool = False


def _saved(model: Any, source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def older(source: Path, folder: Path) -> None:
    """Write a checkpoint whose weights are a random step away from a model's."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * STEP * parameter.std())
    _saved(model, source, folder)


def in_int8(source: Path, folder: Path) -> None:
    """Write a checkpoint whose linear layers hold what int8 leaves of them, with a scale for each output."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                scale = parameter.abs().amax(-1, keepdim=True) / 127
                parameter.copy_((parameter / scale).round() * scale)
    _saved(model, source, folder)


def with_theta(source: Path, folder: Path) -> None:
    """Write a checkpoint with another base of its rotary positions."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_parameters"]["rope_theta"] *= THETA
    path.write_text(json.dumps(config), encoding="utf-8")


HEATED = ("--sampling", "temperature=0.94", "--temperature", "1")
CASES = {
    "doctor clean": Case(),
    "doctor temperature 0.94": Case(options=HEATED),
    "doctor top_p 0.95": Case(options=("--sampling", "top_p=0.95")),
    "doctor one more system sentence": Case(sentence=True),
    "doctor rope_theta x 1.13": Case(engine=with_theta),
    "doctor int8 weights": Case(engine=in_int8),
    "doctor weights of one step earlier": Case(engine=older),
    **{f"gate clean, {dtype}": Case(command="gate", dtype=dtype) for dtype in DTYPES},
    **{f"gate temperature 0.94, {dtype}": Case(command="gate", dtype=dtype, options=HEATED) for dtype in DTYPES},
}


def write_prompts(model: Path, path: Path, system: str) -> None:
    """Write chat prompts as token ids, a line each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = []
    for request in (form.format(subject) for subject in SUBJECTS for form in FORMS):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        lines.append(json.dumps({"prompt_ids": ids}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def measure(case: Case, model: Path, folder: Path) -> dict[str, Any]:
    """Run a command as a user does, and return what it said and what it cost."""
    prompts, others, out = folder / "prompts.jsonl", folder / "engines_prompts.jsonl", folder / "out"
    write_prompts(model, prompts, SYSTEM)
    words = ["--quick", "--model", str(model), "--dtype", case.dtype, "--prompts", str(prompts), *case.options]
    words += ["--engine-arg", "max_model_len=512"]
    if case.engine is not None:
        case.engine(model, folder / "engine")
        words += ["--engine-model", str(folder / "engine")]
    program = ["mismatch_ext"]
    if case.sentence:
        write_prompts(model, others, SYSTEM + SENTENCE)
        program = ["benchmarks.other_prompts", str(others)]
    answer = out / "doctor.json" if case.command == "doctor" else out / "gate.json"
    words += ["--out", str(out)] if case.command == "doctor" else ["--json", str(answer)]
    load, began = os.getloadavg()[0], time.perf_counter()
    first: float | None = None
    said: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-m", *program, case.command, *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line)
        if FIRST_LINE in line and "tokens:" in line:
            first = time.perf_counter() - began
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not answer.is_file():
        raise SystemExit(f"{case.command} wrote no answer (status {process.returncode}):\n{''.join(said)[-2000:]}")
    costs = {
        "status": process.returncode,
        "seconds": time.perf_counter() - began,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_gigabytes": usage.ru_maxrss / 2**20,
        "first_line_seconds": first,
        "load": [load, os.getloadavg()[0]],
    }
    return {**_answered(case.command, json.loads(answer.read_text(encoding="utf-8"))), **costs}


def _answered(command: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return what the command said, without what differs from call to call for no reason."""
    if command == "gate":
        figures = {figure["name"]: figure["value"] for figure in found["figures"]}
        return {"passes": found["passes"], "failed": found["failed"], "figures": figures}
    return {
        "verdict": found["verdict"],
        "causes": {cause["key"]: [cause["parameter"], cause["status"]] for cause in found["causes"]},
        "places": [note for note in found["notes"] if note.startswith(("where:", "block by block"))],
        "tokens": found["tokens"],
        "gap": found["gap"],
        "unexplained": found["unexplained"],
        "seconds_by_part": found["seconds"],
    }


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the made-up fits."""

    tokens: int
    vocabulary: int
    hidden: int = field(default=64)


TOKENS, VOCABULARIES = (1_000, 2_000, 4_000, 8_000), (4_096, 32_768, 262_144)
SIZES = [Size(tokens=tokens, vocabulary=49_152) for tokens in TOKENS] + [
    Size(tokens=1_000, vocabulary=vocabulary) for vocabulary in VOCABULARIES
]


def fit_made_up(size: Size) -> dict[str, Any]:
    """Judge an engine at temperature 0.94, whose log-probabilities are those of a random head, and return what that costs."""
    import numpy as np
    import torch
    from mismatch_ext.adapters.transformers.doctor.scorer import Projected

    from benchmarks.harness import peak
    from mismatch_ext.doctor import Sample, Scores, diagnose
    from mismatch_ext.doctor.logits import score_tokens

    torch.manual_seed(0)
    length = 50
    rows, before = size.tokens // length, peak()
    head = torch.nn.Linear(size.hidden, size.vocabulary, bias=False)
    torch.nn.init.normal_(head.weight, std=3 / size.hidden**0.5)
    logits = Projected(head, torch.randn(size.tokens, size.hidden), size.vocabulary)
    sampled = torch.cat(
        [(logits[at : at + length] / 0.94).softmax(-1).multinomial(1)[:, 0] for at in range(0, size.tokens, length)]
    )
    responses = tuple(map(tuple, sampled.reshape(rows, length).tolist()))
    masks = tuple((True,) * length for _ in responses)
    made = Sample(prompts=((1,),) * rows, responses=responses, masks=masks, logprobs=((0.0,) * length,) * rows)
    exact, cooled = (score_tokens(made, logits, heat)[0] for heat in (1.0, 0.94))
    noise = np.random.default_rng(0).normal(0.0, 1e-5, (2, size.tokens))
    engine = tuple(map(tuple, (cooled + noise[0]).reshape(rows, length).tolist()))
    sample = Sample(prompts=made.prompts, responses=responses, masks=masks, logprobs=engine)
    scores = Scores(trainer=exact, own=exact + noise[1], logits=logits, float32_error=1e-5)
    began, used = time.perf_counter(), time.process_time()
    found = diagnose(sample, scores)
    return {
        "tokens": size.tokens,
        "vocabulary": size.vocabulary,
        "causes": {cause.key: cause.parameter for cause in found.causes},
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - used,
        "more_megabytes": peak() - before,
    }


def _keep(path: Path | None, command: str, row: dict[str, Any]) -> None:
    """Put a row with what it was measured on into a record, in the place of an older one of that command and name."""
    print(json.dumps(row), flush=True)
    if path is None:
        return
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    names = (command, row["case"])
    kept = [record for record in records if (record["command"], record["figures"]["case"]) != names]
    kept.append({"command": command, **measured_on(), "figures": row})
    path.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def grow(path: Path | None) -> None:
    """Fit each size in a process of its own, and print a row of it."""
    for size in SIZES:
        words = [str(size.tokens), str(size.vocabulary)]
        made = subprocess.run(
            [sys.executable, "-m", "benchmarks.doctor", "growth", "--size", *words],
            check=True,
            capture_output=True,
            text=True,
        )
        row = json.loads(made.stdout.splitlines()[-1])
        _keep(path, "python -m benchmarks.doctor growth", {"case": f"{size.tokens} x {size.vocabulary}", **row})


def main() -> None:
    """Measure each case and print a row of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("real", "growth"), default="real")
    parser.add_argument("--only", nargs="+", default=("",), metavar="CASE")
    parser.add_argument("--size", nargs=2, type=int, metavar=("TOKENS", "VOCABULARY"))
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    if given.size is not None:
        print(json.dumps(fit_made_up(Size(tokens=given.size[0], vocabulary=given.size[1]))))
        return
    if given.what == "growth":
        grow(given.record)
        return
    from examples.smollm2 import unpack

    model = unpack()
    for name, case in CASES.items():
        if not name.startswith(tuple(given.only)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = {"case": name, "dtype": case.dtype, **measure(case, model, Path(folder))}
        _keep(given.record, "python -m benchmarks.doctor", row)


if __name__ == "__main__":
    main()
