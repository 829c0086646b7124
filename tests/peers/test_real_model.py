"""A real vocabulary, a tied output head and a chat template: the first four layers of SmolLM2-135M-Instruct.

Its layers write no language, but everything that depends on the vocabulary, the head and the tokenizer is the real model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.smollm2 import unpack
from tests.oracle import expect_float32
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers import scenarios_gate
    from tests.peers.trl import scenarios_real_model
else:
    scenarios_gate = named("tests.peers.scenarios_gate")
    scenarios_real_model = named("tests.peers.trl.scenarios_real_model")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return unpack(layers=4)


def test_float32_updates_reach_a_tied_head_of_49152_tokens_in_trl(run: Run, smollm2: Path, tmp_path: Path) -> None:
    block = {"precision": {"dtype": "float32"}, "monitor": {"weight_sync": "error"}}
    found = run(scenarios_real_model.train, model=smollm2, out=tmp_path, block=block).expect()
    expect_float32(found["history"], found["float32_errors"])
    # The first update sends what the engine started with.
    assert [status for status, *_ in found["verdicts"]] == ["unchanged", "in_sync", "in_sync"], found["verdicts"]
    assert all(step["grad_norm"] > 0 for step in found["history"])


def test_a_gate_admits_it_and_names_a_head_that_updates_do_not_reach(run: Run, smollm2: Path, tmp_path: Path) -> None:
    few = ["--responses", "8", "--max-tokens", "16"]
    names = ["float32", "stale head"]
    found = run(scenarios_gate.gated, out=str(tmp_path), names=names, model=smollm2, more=few).expect()
    assert found["float32"]["status"] == 0, found["float32"]["page"]
    assert "| blocks that differ, of 9 | 0 |" in found["float32"]["page"]
    assert found["stale head"]["status"] == 1
    assert "first block that differs: output head (" in found["stale head"]["page"]
