"""A real vocabulary, a tied output head and a chat template: the first four layers of SmolLM2-135M-Instruct.

Its layers write no language, but everything that depends on the vocabulary, the head and the tokenizer is the real model's.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.smollm2 import unpack
from tests.commands import ROOT, shell
from tests.oracle import expect_float32
from tests.peers.engines.vllm_server import serving
from tests.peers.scenarios import Run, named
from tests.peers.trl.test_server import FLAGS, TRANSFER

scenarios = named("tests.peers.scenarios_real_model")
scenarios_gate = named("tests.peers.scenarios_gate")
scenarios_real_model = named("tests.peers.trl.scenarios_real_model")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return unpack(layers=4)


@pytest.mark.nightly
def test_the_commands_of_the_page_end_with_a_verdict() -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/real.md").read_text(encoding="utf-8"), flags=re.S)
    assert "smollm2 (mean |Δlogp| " in shell(block)


def test_float32_updates_reach_a_tied_head_of_49152_tokens_in_trl(run: Run, smollm2: Path, tmp_path: Path) -> None:
    block = {"precision": {"dtype": "float32"}, "monitor": {"weight_sync": "error"}}
    found = run(scenarios_real_model.train, model=smollm2, out=tmp_path, block=block).expect()
    expect_float32(found["history"], found["float32_errors"])
    # The first update sends what the engine started with.
    assert [status for status, *_ in found["verdicts"]] == ["unchanged", *["in_sync"] * 5], found["verdicts"]
    assert all(step["grad_norm"] > 0 for step in found["history"]), found["history"]


def test_trls_own_colocated_update_reaches_a_real_engine(run: Run, smollm2: Path, tmp_path: Path) -> None:
    """The way of every GPU: TRL hands each tensor to the model of an engine that computes from its weights."""
    found = run(scenarios_real_model.train_as_on_a_gpu, model=smollm2, out=tmp_path, timeout=600).expect()
    expect_float32(found["history"], found["float32_errors"])
    statuses = [status for status, *_ in found["verdicts"]]
    assert statuses == ["unchanged", *["in_sync"] * 5], found["verdicts"]
    assert found["given"] == len(statuses) * found["different"] > 0


def test_a_tensor_that_trls_own_update_loses_ends_the_run(run: Run, smollm2: Path, tmp_path: Path) -> None:
    found = run(scenarios_real_model.train_as_on_a_gpu, model=smollm2, out=tmp_path, lost="down_proj").expect()
    assert "weight update" in found["error"], found


@pytest.mark.nightly
def test_the_doctor_names_and_confirms_a_temperature_within_a_real_vocabulary(
    run: Run, smollm2: Path, tmp_path: Path
) -> None:
    found = run(scenarios.diagnosed, model=smollm2, out=tmp_path / "doctor", sampling="temperature=0.9").expect()
    assert (found["status"], found["verdict"]) == (1, "explained"), found["printed"]
    (cause,) = found["causes"]
    assert (cause["key"], cause["status"]) == ("temperature", "confirmed")
    assert abs(cause["parameter"] - 0.9) < 0.005


def test_chat_prompts_with_tools_are_measured_turn_by_turn(run: Run, smollm2: Path, tmp_path: Path) -> None:
    block = {"precision": {"dtype": "float32"}, "monitor": {"weight_sync": "error"}}
    found = run(scenarios_real_model.train_with_tools, model=smollm2, out=tmp_path, block=block).expect()
    expect_float32(found["history"], found["float32_errors"])
    (batch,) = found["batches"]
    # Two calls, and the answer after them; the tools' own tokens have no probability of the engine's.
    assert batch["turns"] == [3] * 8 and batch["tool_tokens"] > 0 and batch["engine"] == 0.0, batch


def test_a_gate_admits_it_and_names_a_head_that_updates_do_not_reach(run: Run, smollm2: Path, tmp_path: Path) -> None:
    few = ["--responses", "8", "--max-tokens", "16"]
    names = ["float32", "stale head"]
    found = run(scenarios_gate.gated, out=str(tmp_path), names=names, model=smollm2, more=few).expect()
    assert found["float32"]["status"] == 0, found["float32"]["page"]
    assert "| blocks that differ, of 9 | 0 |" in found["float32"]["page"]
    assert found["stale head"]["status"] == 1
    assert "first block that differs: output head (" in found["stale head"]["page"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_five_updates_in_a_row_reach_a_server_from_trl(run: Run, smollm2: Path, tmp_path: Path) -> None:
    block = {"precision": {"dtype": "float32"}, "monitor": {"weight_sync": "error"}}
    with serving(smollm2, tmp_path, *FLAGS, *TRANSFER, development=True) as url:
        to_server = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 120.0}
        found = run(
            scenarios_real_model.train, model=smollm2, out=tmp_path / "run", block=block, timeout=600, **to_server
        ).expect()
    expect_float32(found["history"], found["float32_errors"])
    assert [status for status, *_ in found["verdicts"]] == ["unchanged", *["in_sync"] * 5], found["verdicts"]
