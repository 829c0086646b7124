"""The audit: uniform precision passes, and FP16 applied by half is caught in every combination."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch

from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.audit import EngineReading, SyncReading, TrainerReading, audit
from mismatch_ext.precision.dtypes import (
    ALIASES,
    TrainerFixes,
    canonical,
    coarser,
    spelled,
    torch_dtype,
)
from mismatch_ext.rollout import SamplingSettings

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
@pytest.mark.parametrize("sent", ["float32", "same", None])
def test_uniform_precision_passes(dtype: str, sent: str | None) -> None:
    sync = None if sent is None else SyncReading(sent_dtype=dtype if sent == "same" else sent, received_dtype=dtype)
    report = audit(dtype, trainer(dtype), engine(dtype), sync)
    report.raise_for_findings()
    assert report.ok and not report.findings
    assert report.unread == (() if sync else ("sync",))


# One way for FP16 to be applied by half, and the property that the audit must name.
HALVES: list[tuple[str, str, dict[str, Any]]] = [
    ("trainer", "autocast", {"autocast_dtype": None}),
    ("trainer", "autocast", {"autocast_dtype": "bfloat16"}),
    ("trainer", "loss scaler", {"scaler": None}),
    ("trainer", "loss scaler", {"scaler": {"class": "GradScaler", "enabled": False, "scale": 1.0}}),
    ("trainer", "loss scaler", {"scaler": {"class": "Unknown"}}),
    ("trainer", "parameters", {"parameter_dtypes": {"float16": 1000}}),
    ("trainer", "parameters", {"parameter_dtypes": {"float32": 999, "bfloat16": 1}}),
    ("trainer", "parameters", {"parameter_dtypes": {}}),
    ("trainer", "gradient reduction", {"reduce_dtype": "bfloat16"}),
    ("trainer", "gradient reduction", {"reduce_dtype": "torch.float16"}),
    ("engine", "dtype", {"model_dtype": "bfloat16"}),
    ("engine", "dtype", {"model_dtype": "float32"}),
    ("engine", "parameters", {"parameter_dtypes": {"float16": 900, "bfloat16": 1}}),
    ("engine", "parameters", {"parameter_dtypes": {"float16": 100, "float32": 900}}),
    ("engine", "parameters", {"parameter_dtypes": {"float16": 900, "float8_e4m3fn": 100}}),
    ("engine", "KV cache", {"kv_cache_dtype": "fp8_e5m2"}),
    ("engine", "KV cache", {"kv_cache_dtype": "bfloat16"}),
    ("engine", "log-probabilities", {"logprobs_mode": "raw_logprobs"}),
    ("engine", "quantization", {"quantization": "fp8"}),
    ("sync", "sent dtype", {"sent_dtype": "bfloat16"}),
    ("sync", "received dtype", {"received_dtype": "bfloat16"}),
]


QUANTIZED = {"dtype": "bfloat16", "engine_weights": "fp8_per_channel", "engine_kv_cache": "fp8"}
HELD = {"parameter_dtypes": {"float8_e4m3fn": 900, "float32": 20, "bfloat16": 80}}
FP8 = {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8_e4m3", **HELD}


def test_parts_that_are_quantized_on_purpose_pass() -> None:
    audit(QUANTIZED, trainer("bfloat16"), engine("bfloat16", **FP8), None).raise_for_findings()
    weights, cache = ({"dtype": "bfloat16", "engine_weights": "fp8_per_channel"}, {"kv_cache_dtype": "auto"})
    assert audit(weights, trainer("bfloat16"), engine("bfloat16", **FP8 | cache), None).ok
    cache_alone = {"dtype": "bfloat16", "engine_kv_cache": "fp8_e4m3"}
    assert audit(cache_alone, trainer("bfloat16"), engine("bfloat16", kv_cache_dtype="fp8_e4m3"), None).ok


@pytest.mark.parametrize(
    ("policy", "changes", "what", "fix"),
    [
        (QUANTIZED, {"quantization": "int8"}, "quantization", "quantization='fp8_per_channel', or correct"),
        (QUANTIZED, {"quantization": None}, "quantization", "mismatch.precision.engine_weights"),
        (QUANTIZED, {"kv_cache_dtype": "auto"}, "KV cache", "kv_cache_dtype='fp8', or correct"),
        (QUANTIZED, {"kv_cache_dtype": "fp8_e5m2"}, "KV cache", "mismatch.precision.engine_kv_cache"),
        (QUANTIZED, {"parameter_dtypes": {"float8_e4m3fn": 900, "float16": 1}}, "parameters", "dtype='bfloat16'"),
        ({"dtype": "bfloat16", "engine_weights": "fp8_per_channel"}, {}, "KV cache", "engine_kv_cache"),
        ({"dtype": "bfloat16", "engine_kv_cache": "fp8"}, HELD | {"parameter_dtypes": {"bfloat16": 1}}, "quantization",
         "say so: mismatch.precision.engine_weights"),
    ],
)  # fmt: skip
def test_a_part_that_is_quantized_otherwise_is_refused_by_name(
    policy: dict[str, str], changes: dict[str, Any], what: str, fix: str
) -> None:
    report = audit(policy, trainer("bfloat16"), engine("bfloat16", **FP8 | changes), None)
    (finding,) = report.findings
    assert finding.what == what and fix in finding.fix and finding.expected != finding.found


def halved(*halves: tuple[str, str, dict[str, Any]]) -> Any:
    changes: dict[str, dict[str, Any]] = {"trainer": {}, "engine": {}, "sync": {}}
    for side, _, change in halves:
        changes[side].update(change)
    sync = SyncReading(**{"sent_dtype": "float32", "received_dtype": "float16", **changes["sync"]})
    return audit(
        "float16",
        trainer("float16", **changes["trainer"]),
        engine("float16", **changes["engine"]),
        sync,
    )


@pytest.mark.parametrize("half", HALVES, ids=lambda half: f"{half[0]}-{half[2]}")
def test_each_half_is_found_and_nothing_else(half: tuple[str, str, dict[str, Any]]) -> None:
    report = halved(half)
    (finding,) = report.findings
    assert (finding.side, finding.what) == half[:2]
    assert finding.expected and finding.found and finding.fix.endswith(".")
    with pytest.raises(PrecisionError, match="float16 was asked for on both sides, but 1 of"):
        report.raise_for_findings()


def test_the_error_lists_each_finding_on_a_line_with_what_to_change() -> None:
    report = audit(
        "float16",
        trainer("float16", autocast_dtype=None, scaler=None),
        engine("bfloat16"),
        None,
        TrainerFixes(float16_on_cpu="Turn it on yourself."),
    )
    with pytest.raises(PrecisionError) as caught:
        report.raise_for_findings()
    lines = str(pickle.loads(pickle.dumps(caught.value))).splitlines()
    assert lines[0] == "float16 was asked for on both sides, but 4 of 8 readings differ:"
    assert lines[1] == "  - trainer autocast: expected float16, found none. Turn it on yourself."
    assert lines[2].startswith("  - trainer loss scaler: expected enabled, found none. Use mismatch_ext")
    assert lines[3].startswith(
        "  - engine dtype: expected float16, found bfloat16. Start vllm 0.30.0 with dtype='float16'"
    )
    # 900 of 1000 parameters are bfloat16, the rest float32
    assert lines[4].startswith("  - engine parameters: expected mostly float16, found bfloat16 90.0%, float32 10.0%.")
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("dtype", "changes", "what"),
    [
        ("float32", {"autocast_dtype": "bfloat16"}, "autocast"),
        ("float32", {"scaler": {"class": "GradScaler", "enabled": True, "scale": 4.0}}, "loss scaler"),
        ("bfloat16", {"scaler": {"class": "GradScaler", "enabled": True, "scale": 4.0}}, "loss scaler"),
        ("bfloat16", {"autocast_dtype": "float16"}, "autocast"),
        ("bfloat16", {"autocast_dtype": None}, "autocast"),
        ("bfloat16", {"parameter_dtypes": {"bfloat16": 1}}, "parameters"),
    ],
)
def test_what_was_not_asked_for_is_found_too(dtype: str, changes: dict[str, Any], what: str) -> None:
    report = audit(dtype, trainer(dtype, **changes), engine(dtype), None)
    assert [f.what for f in report.findings] == [what]


def test_a_model_without_a_trainable_parameter_is_named() -> None:
    frozen = trainer("float32", parameter_dtypes={})
    assert frozen.compute_dtype == "float32"
    (finding,) = audit("float32", frozen, None, None).findings
    assert "no trainable parameter" in str(finding)


def test_without_an_engine_only_the_trainer_is_audited() -> None:
    report = audit("float16", trainer("float16"), None, None)
    assert report.ok and {c.side for c in report.checks} == {"trainer"}
    assert report.unread == ("sync", "engine")
    assert not audit("float16", trainer("float16", scaler=None), None, None).ok


def test_names_are_read_in_any_spelling() -> None:
    report = audit(
        "float16",
        trainer(
            "float16",
            autocast_dtype="torch.float16",
            parameter_dtypes={"torch.float32": 1},
            reduce_dtype="fp32",
        ),
        engine(
            "float16",
            model_dtype="half",
            parameter_dtypes={"fp16": 2, "torch.float16": 1},
            kv_cache_dtype="fp16",
        ),
        SyncReading(sent_dtype="fp32", received_dtype="torch.float16"),
    )
    assert report.ok, report.findings


def test_report_as_data() -> None:
    report = halved(HALVES[0], HALVES[10])
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["ok"] is False and data["dtype"] == "float16"
    assert [check["what"] for check in data["checks"] if not check["ok"]] == ["autocast", "dtype"]
    assert {check["what"] for check in data["checks"]} >= {"parameters", "KV cache", "sent dtype"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fp16", "float16"), ("HALF", "float16"), ("torch.bfloat16", "bfloat16"), (torch.float32, "float32")],
)
def test_canonical(name: str | torch.dtype, expected: str) -> None:
    assert canonical(name) == expected
    assert torch_dtype(name) is getattr(torch, expected)


@pytest.mark.parametrize("name", ["auto", "float64", "fp8", torch.int8, ""])
def test_other_dtypes_are_refused_by_name(name: str | torch.dtype) -> None:
    with pytest.raises(PrecisionError, match="is not a compute dtype; allowed: float32, float16, bfloat16"):
        canonical(name)
    assert spelled(name) == str(name).removeprefix("torch.")


def test_the_coarser_dtype_is_the_one_of_fewer_bits() -> None:
    assert [coarser(a, b) for a, b in (("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "fp32"))] == [
        "bfloat16", "bfloat16", "float16",
    ]  # fmt: skip
    assert set(ALIASES.values()) == set(DTYPES)


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
