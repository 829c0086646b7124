"""The command that runs every flow on the real model: what it records of one, and what it runs again."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import real_flows
from examples.real_flows import FLOWS, Flow


@pytest.mark.parametrize("flow", [flow for flow in FLOWS if flow.script is not None], ids=lambda flow: flow.name)
def test_the_scripts_of_pages_run_here_with_the_real_model(flow: Flow) -> None:
    assert flow.script is not None
    text = flow.script.text(Path("runs/somewhere"))
    compile(text, flow.name, "exec")
    assert real_flows.MODEL in text and "Qwen" not in text and "max_steps=1" in text and "runs/somewhere" in text
    assert "def reward" in text and "trainer.train()" in text
