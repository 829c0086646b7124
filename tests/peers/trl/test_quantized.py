"""A vLLM that is quantized on purpose, under TRL: as the block names it, it trains, and its updates are verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mismatch_ext.log_reading import read_run
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_quantized")

pytestmark = pytest.mark.engine


def test_an_engine_that_is_quantized_on_purpose_trains_and_is_verified(run: Run, dense: Path, tmp_path: Path) -> None:
    """Linear layers in fp8, quantized by vLLM at each update; a second engine whose method quantizes nothing of the model."""
    result = run(scenarios.quantized, model=dense, out=tmp_path).expect()
    assert result["verdict"] == "in_sync" and len(result["history"]) == 3
    assert all(0 < step["mismatch/k3_kl"] < 0.1 for step in result["history"])
    header = read_run(tmp_path / "run" / "mismatch").header
    engine, audit = header["engine"], header["audit"]
    assert engine["quantization"] == "fp8_per_channel" and "float8_e4m3fn" in json.dumps(engine["parameter_dtypes"])
    assert audit["ok"] and {"quantization", "parameters"} <= {check["what"] for check in audit["checks"]}
    # What the trainer sends, quantized by vLLM's own code on a scale per channel, is what the engine holds.
    assert result["layers"] > 0 and result["other"] == 0
    assert result["moved"] > 0
    assert "engine quantization: expected int8_per_channel_weight_only, found none" in result["refused"]
