"""The doctor on a real vocabulary with a tied head, in one process."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from mismatch_ext.adapters import cli


def diagnosed(model: str, out: str, sampling: str) -> dict[str, Any]:
    """Return the doctor's status, what it printed and its JSON, of an engine that samples with a setting of its own.

    Args:
        model: Folder of the model.
        out: Folder of the result.
        sampling: The setting, as for `--sampling`.
    """
    words = ["doctor", "--model", model, "--prompts", "examples/doctor/prompts.jsonl", "--out", out, "--quick"]
    words += ["--dtype", "float32", "--responses", "16", "--max-tokens", "16", "--engine-arg", "max_model_len=256"]
    log = Path(out) / "printed.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as printed, redirect_stdout(printed):
        status = cli.main([*words, "--sampling", sampling])
    data = json.loads((Path(out) / "doctor.json").read_text(encoding="utf-8"))
    return {"status": status, "printed": log.read_text(encoding="utf-8"), **data}
