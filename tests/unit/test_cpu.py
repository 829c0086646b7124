"""What is asked of the CPU: which machines are lesser than this one, and what cannot be planted here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import cpu
from tests.evidence import doctor_faults
from tests.isa import SAY

ROOT = Path(__file__).resolve().parents[2]


def supports(monkeypatch: pytest.MonkeyPatch, *, avx512: bool, float16: bool, amx: bool) -> None:
    for name, there in {"avx512": avx512, "amx_tile": amx}.items():
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda there=there: there)
    packs: Callable[[torch.dtype], bool] = lambda dtype: float16 or dtype != torch.float16  # noqa: E731
    monkeypatch.setattr(cpu, "packs_linears", packs)


@pytest.mark.parametrize(
    ("has", "below"),
    [
        ({"avx512": True, "float16": True, "amx": True}, ["AVX512_CORE_BF16", "AVX2"]),
        ({"avx512": True, "float16": False, "amx": False}, ["AVX2", "AVX"]),
        ({"avx512": False, "float16": False, "amx": False}, ["AVX", "SSE41"]),
    ],
    ids=["Xeon with AMX", "Zen 4", "Zen 3"],
)
def test_the_two_machines_below_each_kind_of_cpu(
    has: dict[str, bool], below: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    supports(monkeypatch, **has)
    assert [limits["ONEDNN_MAX_CPU_ISA"] for limits in cpu.lesser().values()] == below


def test_a_lesser_machine_computes_as_it_says() -> None:
    lacking = str(ROOT / "tests/lesser_cpu")
    for limits in cpu.lesser().values():
        environment = {**os.environ, **limits, "PYTHONPATH": lacking}
        said = subprocess.run(
            [sys.executable, "-c", SAY],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        assert f"torch {limits['ATEN_CPU_CAPABILITY'].upper()} | AMX False" in said


def test_a_fault_that_this_cpu_cannot_have_is_said_and_not_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_faults, "has_fp8_cache", lambda: False)
    cached = {name: planted for name, planted in doctor_faults.WEIGHTS.items() if name.startswith("fp8 KV cache")}
    assert len(cached) == 2
    found = doctor_faults.table(cached, tmp_path)
    assert set(found) == set(cached) and all("without AVX-512" in said for said in found.values())
    assert not list(tmp_path.iterdir())
    assert not doctor_faults.cannot(doctor_faults.WEIGHTS["fp8 weights"])
    monkeypatch.setattr(doctor_faults, "has_fp8_cache", lambda: True)
    assert not any(doctor_faults.cannot(planted) for planted in cached.values())
