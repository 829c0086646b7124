"""Gemma-2 in TRL with real vLLM: under transformers' own attention, which drops the soft cap, and under the one that has it."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters import cli
from mismatch_ext.adapters.trl import attach

from mismatch_ext.log_reading import read_run
from tests.models import take_sdpa_for_gemma2
from tests.peers.trl import scenarios_attach
from tests.peers.trl.scenarios_training import build, digest_of

take_sdpa_for_gemma2()

NAMED = "the trainer's attention (sdpa) has no soft cap"
FILE = """
model_name_or_path: {model}
output_dir: {out}
use_cpu: true
bf16: false
dtype: float32
report_to: none
use_vllm: true
vllm_mode: colocate
vllm_max_model_length: 96
vllm_gpu_memory_utilization: 0.05
per_device_train_batch_size: 32
num_generations: 8
max_completion_length: 40
"""


def float32(attention: str) -> dict[str, Any]:
    """Return arguments of a trainer in float32 with an attention; "" for transformers' own choice."""
    chosen = {"attn_implementation": attention} if attention else {}
    return {"bf16": False, "model_init_kwargs": {"dtype": "float32", **chosen}}


@contextmanager
def cap_warnings() -> Iterator[list[str]]:
    """Yield a list that has the warnings of a missing soft cap once the context ends."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [text for warning in caught if "soft cap" in (text := str(warning.message))]


def trained(model: str, out: str) -> None:
    """Warn at the start of runs under transformers' own attention, with a block and by `attach`, and of no update."""
    block: dict[str, Any] = {"precision": {"dtype": "float32"}}
    with cap_warnings() as faulty:
        trainer = build(model, f"{out}/faulty", block, max_steps=1, **float32(""))
        trainer.train()
    events = read_run(Path(out) / "faulty/mismatch").events
    assert faulty[0] in [event.message for event in events]
    (update,) = [event.message for event in events if event.name == "weight_sync"]
    assert "apart before any update" in update

    stock = scenarios_attach.build(model, f"{out}/attached", max_steps=1, **float32(""))
    before, random = digest_of(stock.model), torch.get_rng_state()
    with cap_warnings() as attached:
        attach(stock)
    assert digest_of(stock.model) == before and torch.equal(torch.get_rng_state(), random)
    assert stock.model.config._attn_implementation == "sdpa"
    for said in (faulty, attached):
        (message,) = said
        assert NAMED in message and "attn_implementation: eager" in message

    with cap_warnings() as healthy:
        trainer = build(model, f"{out}/healthy", block, max_steps=1, **float32("eager"))
        trainer.train()
    assert healthy == []


def examined_files(model: str, out: str) -> None:
    """Let the doctor read a run's file that names eager attention, which is clean, and one that names none."""
    prompts = Path(out) / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+{n + 1}="}) + "\n" for n in range(64)), encoding="utf-8")
    for name, line in (("healthy", "attn_implementation: eager\n"), ("faulty", "")):
        file, log = Path(out) / f"{name}.yaml", Path(out) / f"{name}.txt"
        file.write_text(FILE.format(model=model, out=out) + line, encoding="utf-8")
        asked = ["doctor", "--trl", str(file), "--dtype", "float32", "--prompts", str(prompts), "--quick"]
        with log.open("w", encoding="utf-8") as printed, redirect_stdout(printed):
            status = cli.main([*asked, "--responses", "64", "--out", str(Path(out) / name)])
        found = json.loads((Path(out) / name / "doctor.json").read_text(encoding="utf-8"))
        page, causes = log.read_text(encoding="utf-8"), [cause["key"] for cause in found["causes"]]
        if name == "healthy":
            assert status == 0 and found["verdict"] == "clean" and causes == [], page
            assert found["run"]["attention"] == "eager"
        else:
            assert status == 1 and causes == ["attention"] and NAMED in page, page
