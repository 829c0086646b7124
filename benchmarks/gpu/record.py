"""The record of a run: on what, with what and by what its figures were measured."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import Setting
from mismatch_ext.versions import installed

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("torch", "transformers", "safetensors", "numpy", "triton", "vllm", "sglang")
TREES = ("mismatch_ext", "adapters", "patches", "benchmarks")


def device_name(device: str) -> str:
    """Return the name of a GPU, or of the processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    return found[1].strip() if found else platform.processor() or platform.machine()


def slug(name: str) -> str:
    """Return a device's name as a part of a file's name: letters and digits, and lower case."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def machine(device: str) -> dict[str, Any]:
    """Return the device, the processor beside it, and memory."""
    found: dict[str, Any] = {
        "device": device_name(device),
        "cpu": device_name("cpu"),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device_memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def code() -> dict[str, Any]:
    """Return commit and trees of the code; None where there is no checkout."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {"commit": None, "dirty": None, "trees": {}}
    changed = _git("status", "--porcelain", "--", *TREES)
    return {
        "commit": commit,
        "dirty": bool(changed),
        "trees": {path: _git("rev-parse", f"HEAD:{path}") for path in TREES},
    }


def versions() -> dict[str, str]:
    """Return the versions of what is installed and counts."""
    found = {"python": platform.python_version()}
    return found | {name: version for name in PEERS if (version := installed(name)) is not None}


def today() -> str:
    """Return the time of day, in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def record_of(setting: Setting, command: str, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        setting: What decided it.
        command: What was typed.
        parts: Of each finished part, what was kept of it.
    """
    return {
        "name": f"gpu-{slug(device_name(setting.device))}",
        "claim": "What one device shows of the gap between transformers' cached decode and its forward pass, and what mends it.",
        "command": command,
        "setting": setting.data(),
        "machine": machine(setting.device),
        "versions": versions(),
        **code(),
        "date": today(),
        "seconds": round(sum(part["seconds"] for part in parts.values())),
        "parts": {
            name: {
                "seconds": part["seconds"],
                "date": part["date"],
                "figures": {key: value for key, value in part["found"].items() if key != "points"},
            }
            for name, part in parts.items()
        },
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
