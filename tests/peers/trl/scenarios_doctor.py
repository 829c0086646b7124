"""What TRL starts its engine with, taken from its own code, beside what the doctor reads off its configuration file."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.arithmetic.shipped import FOLDER

TRL = """
model_name_or_path: {model}
output_dir: {out}
use_cpu: true
bf16: {bf16}
report_to: none
use_vllm: true
vllm_mode: colocate
vllm_max_model_length: 96
vllm_gpu_memory_utilization: 0.2
per_device_train_batch_size: 4
num_generations: 4
max_completion_length: 24
temperature: 0.9
top_p: 0.95
top_k: 8
min_p: 0.01
repetition_penalty: 1.1
generation_kwargs: {{presence_penalty: 0.2, top_p: 0.8}}
dataset_name: rows.jsonl
of_the_script: 3
"""


class Stopped(Exception):
    """The host has said what it came for."""


def trl_passes(out: str) -> dict[str, Any]:
    """Return what TRL gives `LLM` and `SamplingParams`, and the run that the doctor reads."""
    import trl.generation.vllm_generation as module
    from datasets import Dataset
    from mismatch_ext.adapters.doctor.sides import Run
    from mismatch_ext.adapters.doctor.trl_run import _parsed, read_trl
    from trl import GRPOTrainer
    from vllm import SamplingParams

    path = Path(out) / "config.yaml"
    path.write_text(TRL.format(model=FOLDER / "dense", out=out, bf16="false"), encoding="utf-8")
    started: dict[str, Any] = {}
    asked: list[SamplingParams] = []

    class Recorded:
        def __init__(self, **arguments: Any) -> None:
            started.update(arguments)

        def generate(self, prompts: Any, sampling_params: SamplingParams, **rest: Any) -> None:
            asked.append(sampling_params)
            raise Stopped

    own, module.LLM = module.LLM, Recorded
    _, args, model, _ = _parsed(path)
    rows = Dataset.from_list([{"prompt": "1+1="}] * 8)
    trainer = GRPOTrainer(
        model=model.model_name_or_path, args=args, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=rows,
    )  # fmt: skip
    try:
        trainer.vllm_generation.generate([[1, 2]], None, 1)
    except Stopped:
        pass
    module.LLM = own
    found = read_trl(path)
    ours = SamplingParams(max_tokens=found.max_tokens, logprobs=0, **found.sides["sampling"])
    mixed = Path(out) / "mixed.yaml"
    mixed.write_text(TRL.format(model=FOLDER / "dense", out=out, bf16="true"), encoding="utf-8")
    block = Path(out) / "block.yaml"
    block.write_text(
        TRL.format(model=FOLDER / "dense", out=out, bf16="null")
        + "mismatch: {precision: {dtype: float16}}\ncast_lm_head_to_fp32: true\n",
        encoding="utf-8",
    )
    return {
        "passed": started,
        "weights": str(next(trainer.model.parameters()).dtype),
        "sampling": {"trl": repr(asked[0]), "doctor": repr(ours)},
        "read": {**asdict(found), "run": asdict(Run(**found.sides))},
        "mixed": asdict(Run(**read_trl(mixed).sides)),
        "block": asdict(Run(**read_trl(block).sides)),
    }
