"""`mismatch-ext doctor --server` against a stock vLLM server: a clean run, and a fault that is named and confirmed over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mismatch_ext.adapters import cli

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from tests.peers.engines.vllm_server import serving


@pytest.mark.engine
@pytest.mark.numeric
def test_over_http_a_clean_run_names_nothing_and_a_fault_is_named_and_confirmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(row["prompt"] for row in make_dataset(96, seed=5000)), encoding="utf-8")
    asked = ["doctor", "--model", str(FOLDER / "dense"), "--prompts", str(prompts), "--quick", "--responses", "96"]
    with serving(FOLDER / "dense", tmp_path, "--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs") as url:
        asked += ["--server", url, "--out", str(tmp_path)]
        assert cli.main(asked) == 0, capsys.readouterr().out
        clean = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
        assert clean["verdict"] == "clean" and clean["causes"] == []
        assert clean["run"]["server"]["url"] == url and clean["run"]["dtype"] == "bfloat16"
        assert any("the server is vLLM" in note for note in clean["notes"])
        assert cli.main([*asked, "--sampling", "temperature=0.9"]) == 1, capsys.readouterr().out
        fault = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    (cause,) = fault["causes"]
    assert cause["key"] == "temperature" and abs(cause["parameter"] - 0.9) < 0.005
    assert cause["status"] == "confirmed" and fault["verdict"] == "explained"
