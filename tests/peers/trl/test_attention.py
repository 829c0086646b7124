"""Gemma-2 in TRL with real vLLM: transformers' own attention drops its soft cap, and vLLM's does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.commands import shell
from tests.models import tiny_gemma2
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_attention as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_attention")

OLDER = """import sys
from mismatch_ext.adapters import cli
from tests.models import take_sdpa_for_gemma2
take_sdpa_for_gemma2()
sys.exit(cli.main())"""
NAMED = "the trainer's attention (sdpa) has no soft cap"


@pytest.mark.engine
@pytest.mark.numeric
def test_a_file_of_gemma_2_is_clean_with_eager_and_names_the_attention_without(run: Run, tmp_path: Path) -> None:
    model = tiny_gemma2(tmp_path / "model")
    found = run(scenarios.examined_files, model=model, out=str(tmp_path)).expect()
    healthy, faulty = found["healthy"], found["faulty"]
    assert healthy["status"] == 0 and healthy["verdict"] == "clean" and not healthy["causes"], healthy["printed"]
    assert healthy["run"]["attention"] == "eager" and "attn_implementation" not in healthy["settings"]["left_out"]
    assert healthy["settings"]["origin"]["attention"] == "healthy.yaml: attn_implementation"
    assert faulty["status"] == 1 and [cause["key"] for cause in faulty["causes"]] == ["attention"], faulty["printed"]
    assert NAMED in faulty["printed"] and "attn_implementation: eager" in faulty["printed"]
    assert faulty["gap"]["logp_abs_diff_mean"] > 0.02 and "refuted" not in faulty["printed"]


@pytest.mark.engine
def test_a_run_of_gemma_2_is_warned_at_its_start_and_no_update_is_blamed(run: Run, tmp_path: Path) -> None:
    model = tiny_gemma2(tmp_path / "model")
    found = run(scenarios.trained, model=model, out=str(tmp_path)).expect()
    for said in (found["faulty"], found["attached"]):
        assert len(said) == 1 and NAMED in said[0] and "attn_implementation: eager" in said[0], said
    assert found["faulty"][0] in found["events"]
    assert len(found["update"]) == 1 and "apart before any update" in found["update"][0], found["update"]
    assert found["healthy"] == [] and found["diagnosis"]["verdict"] == "clean", found["diagnosis"]["notes"]
    assert found["untouched"] and found["attention"] == "sdpa"


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_every_command_is_clean_with_eager_and_names_the_attention_without(tmp_path: Path) -> None:
    model = tiny_gemma2(tmp_path / "model")
    given = f"--model {model} --prompts examples/doctor/prompts.jsonl --dtype float32 --engine-arg max_model_len=160"
    commands = {
        "gate": f"mismatch-ext gate {given} --quick --max-tokens 64 --json {tmp_path}/gate.json",
        "quick": f"mismatch-ext doctor {given} --max-tokens 96 --quick --out {tmp_path}/quick",
        "doctor": f"mismatch-ext doctor {given} --max-tokens 96 --out {tmp_path}/doctor",
    }
    for name, command in commands.items():
        shell(f"{command} --trainer-attention eager", OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")
        older = command.replace("mismatch-ext", f"python -c '{OLDER}'", 1)
        page = shell(older, statuses=(1,), OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")
        assert NAMED in page and "refuted" not in page, page
        if name != "gate":
            (cause,) = json.loads((tmp_path / name / "doctor.json").read_text(encoding="utf-8"))["causes"]
            assert cause["key"] == "attention" and cause["family"] == "trainer", page
    failed = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))["failed"]
    assert "error of the trainer in units of rounding" in failed and not any("engine" in name for name in failed)
