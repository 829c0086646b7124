"""`mismatch-ext doctor --server` against stock servers: a clean run, and a fault that is named and confirmed over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from mismatch_ext.adapters import cli

from examples.arithmetic.shipped import FOLDER
from examples.arithmetic.task import make_dataset
from tests.peers.engines import sglang_server, vllm_server

SERVERS: dict[str, tuple[Callable[..., AbstractContextManager[str]], tuple[str, ...]]] = {
    "vLLM": (vllm_server.serving, ("--logprobs-mode", "processed_logprobs")),
    "SGLang": (sglang_server.serving, ("--context-length", "256")),
}


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.numeric
@pytest.mark.parametrize("kind", SERVERS)
def test_over_http_a_clean_run_names_nothing_and_a_fault_is_named_and_confirmed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(row["prompt"] for row in make_dataset(96, seed=5000)), encoding="utf-8")
    asked = ["doctor", "--model", str(FOLDER / "dense"), "--prompts", str(prompts), "--quick", "--responses", "96"]
    serving, flags = SERVERS[kind]
    with serving(FOLDER / "dense", tmp_path, "--dtype", "bfloat16", *flags) as url:
        asked += ["--server", url, "--out", str(tmp_path)]
        assert cli.main(asked) == 0, capsys.readouterr().out
        clean = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
        assert clean["verdict"] == "clean" and clean["causes"] == []
        assert clean["run"]["server"]["url"] == url and clean["run"]["dtype"] == "bfloat16"
        assert any(f"the server is {kind} " in note for note in clean["notes"])
        assert cli.main([*asked, "--sampling", "temperature=0.9"]) == 1, capsys.readouterr().out
        fault = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    (cause,) = fault["causes"]
    assert cause["key"] == "temperature" and abs(cause["parameter"] - 0.9) < 0.005
    assert cause["status"] == "confirmed" and fault["verdict"] == "explained"
