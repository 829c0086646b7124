"""The audit: uniform precision passes, and FP16 applied by half is caught in every combination."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.audit import EngineReading, SyncReading, TrainerReading, audit
from mismatch_ext.precision.dtypes import (
    TrainerFixes,
    canonical,
    coarser,
)
from mismatch_ext.rollout import SamplingSettings

DATA = Path(__file__).parents[1] / "data"
DTYPES = ("float32", "float16", "bfloat16")


def trainer(dtype: str, **changes: Any) -> TrainerReading:
    """A trainer that is right for a dtype, but for the changes."""
    right = TrainerReading(
        parameter_dtypes={"float32": 1000},
        autocast_dtype=None if dtype == "float32" else dtype,
        scaler={"class": "LossScaler", "enabled": True, "scale": 65536.0} if dtype == "float16" else None,
        reduce_dtype=None,
        device="cpu",
    )
    return dataclasses.replace(right, **changes)


def engine(dtype: str, **changes: Any) -> EngineReading:
    """An engine that is right for a dtype, but for the changes."""
    right = EngineReading(
        engine="vllm",
        version="0.30.0",
        model_dtype=dtype,
        parameter_dtypes={dtype: 900, "float32": 100},
        kv_cache_dtype="auto",
        logprobs_mode="processed_logprobs",
        quantization=None,
    )
    if dtype == "float32":
        right = dataclasses.replace(right, parameter_dtypes={"float32": 1000})
    return dataclasses.replace(right, **changes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_precision_passes(dtype: str) -> None:
    sync = SyncReading(sent_dtype="float32", received_dtype=dtype)
    report = audit(dtype, trainer(dtype), engine(dtype), sync)
    report.raise_for_findings()
    assert report.ok and report.unread == ()


# Each line: what was asked for, what differs on a side that is right otherwise, and the property that must be named, if any.
CASES = [json.loads(line) for line in (DATA / "precision_audit.jsonl").read_text(encoding="utf-8").splitlines()]


def audit_changed(asked: Any, side: str, change: dict[str, Any]) -> Any:
    """Audit two sides and a sync that are right for a dtype, but for a change of one of them."""
    dtype = asked if isinstance(asked, str) else asked["dtype"]
    changes = {side: change}
    sync = SyncReading(**{"sent_dtype": "float32", "received_dtype": dtype} | changes.get("sync", {}))
    of_trainer = trainer(dtype, **changes.get("trainer", {}))
    of_engine = engine(dtype, **changes.get("engine", {}))
    return audit(asked, of_trainer, of_engine, sync)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['side']}-{case['what']}-{case['change']}")
def test_the_one_difference_is_found_and_nothing_else(case: dict[str, Any]) -> None:
    report = audit_changed(case["dtype"], case["side"], case["change"])
    if case["what"] is None:
        report.raise_for_findings()
        assert report.ok
        return
    (finding,) = report.findings
    assert (finding.side, finding.what) == (case["side"], case["what"])
    assert finding.expected != finding.found and finding.fix.endswith(".")
    with pytest.raises(PrecisionError, match="1 of"):
        report.raise_for_findings()


def test_the_error_lists_each_finding_on_a_line_and_survives_pickling() -> None:
    fixes = TrainerFixes(float16_on_cpu="Turn it on yourself.")
    half = trainer("float16", autocast_dtype=None, scaler=None)
    report = audit("float16", half, engine("bfloat16"), None, fixes)
    with pytest.raises(PrecisionError, match="4 of 8 readings differ") as caught:
        report.raise_for_findings()
    lines = str(pickle.loads(pickle.dumps(caught.value))).splitlines()
    assert lines[1] == "  - trainer autocast: expected float16, found none. Turn it on yourself."
    assert len(lines) == 5


def test_without_an_engine_only_the_trainer_is_audited() -> None:
    report = audit("float16", trainer("float16"), None, None)
    assert report.ok and {c.side for c in report.checks} == {"trainer"}
    assert report.unread == ("sync", "engine")
    assert not audit("float16", trainer("float16", scaler=None), None, None).ok


def test_names_are_read_in_any_spelling() -> None:
    half = trainer("float16", autocast_dtype="torch.float16", reduce_dtype="fp32")
    sampler = engine("float16", model_dtype="half", parameter_dtypes={"fp16": 1}, kv_cache_dtype="HALF")
    assert audit("float16", half, sampler, SyncReading(sent_dtype="fp32", received_dtype="torch.float16")).ok


@pytest.mark.parametrize("name", ["auto", "fp8", torch.int8])
def test_other_dtypes_are_refused_by_name(name: str | torch.dtype) -> None:
    with pytest.raises(PrecisionError, match="is not a compute dtype"):
        canonical(name)


def test_the_coarser_dtype_is_the_one_of_fewer_bits() -> None:
    assert coarser("fp32", "bf16") == coarser("bf16", "fp16") == "bfloat16"
    assert coarser("fp16", "fp32") == "float16"


@pytest.mark.parametrize(
    ("name", "mode", "renormalizes"),
    [("vllm", "processed_logprobs", True), ("vllm", "raw_logprobs", False), ("sglang", "processed_logprobs", False)],
)
def test_log_probabilities_of_vllm_after_processing_alone_are_of_what_survives_truncation(
    name: str, mode: str, renormalizes: bool
) -> None:
    reading = engine("bfloat16", engine=name, logprobs_mode=mode)
    assert reading.renormalizes == renormalizes
    bias = SamplingSettings(top_p=0.9).ratio_bias(renormalized=reading.renormalizes)
    assert bias is not None and ("too small" if renormalizes else "too large") in bias
