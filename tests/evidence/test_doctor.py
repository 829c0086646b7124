"""`mismatch-ext doctor` on real vLLM: faults that are planted, and what they are called."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest

from tests.evidence.doctor_faults import FAULTS, examined, right
from tests.evidence.pages import slice_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
COMMAND = f"make evidence SLICE={slice_of('doctor_clean')}"
CLEAN = [name for name in FAULTS if name.startswith("clean")]
REQUESTS = ["temperature 0.97, trainer 1", "top_p 0.93", "top_k 3", "repetition_penalty 1.04"]
HIDDEN = "top_p 0.9, raw log-probabilities"
# In a dense model this small a change of epsilon is below what rounding and 6,000 tokens let see.
FINE = "norm epsilon x 30"
SIDES = [name for name in FAULTS if name not in (*CLEAN, *REQUESTS, HIDDEN, FINE)]


def table(kind: str, names: Iterable[str], folder: Path) -> dict[str, str]:
    """Return what each fault was called, and hold that the name is right."""
    found, wrong = {}, []
    for number, name in enumerate(names):
        place = folder / str(number)
        place.mkdir()
        seen = examined(kind, FAULTS[name], place)
        said = [f"{cause.said} ({cause.status})" for cause in seen.causes] or ["nothing is named"]
        shares = [f"{cause.share:.0%}" for cause in seen.causes if cause.share is not None]
        found[name] = "; ".join([*said, *shares, f"left {seen.left:.2f}", seen.verdict])
        wrong += [] if right(FAULTS[name], seen) else [f"{name}: {found[name]}"]
    assert not wrong, "\n".join(wrong)
    return found


def test_nothing_is_named_on_clean_runs(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names nothing on clean runs of a dense model in bfloat16, float16 and float32."""
    evidence("doctor_clean", table("dense", CLEAN, tmp_path), command=COMMAND)


def test_faults_of_requests_are_named(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names sampling settings that the trainer does not know of, with their values, hidden ones too."""
    evidence("doctor_sampling", table("dense", [*REQUESTS, HIDDEN], tmp_path), command=COMMAND)


def test_faults_of_an_engine_are_named(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names another configuration, other weights, another cache, another prompt and another dtype of an engine."""
    evidence("doctor_engine", table("dense", SIDES, tmp_path), command=COMMAND)


def test_faults_are_named_with_experts_too(evidence: Callable[..., None], tmp_path: Path) -> None:
    """The doctor names what an engine with experts does otherwise, under its own routes, and nothing where it is clean."""
    names = ["clean, bfloat16", "rope_theta x 1.07", FINE, "other weights", "fp8 KV cache"]
    evidence("doctor_experts", table("moe", names, tmp_path), command=COMMAND)
