"""verl's SGLang server: an answer that verl could not use is told; it is an error only if the config acts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.engines.sglang_environment import MAIN, run_sglang
from tests.peers.scenarios import named

scenarios = named("tests.peers.verl.scenarios_sglang_answers")

pytestmark = pytest.mark.engine


def test_answers_stay_sglangs_own_unless_the_config_acts_and_every_refusal_is_told(tmp_path: Path) -> None:
    found = run_sglang(scenarios.answers, MAIN, tmp_path)
    acts, measures = found["acts null"], found["measures null"]
    assert acts["error"] == "NonFiniteLogprobError" and acts["same"] == []
    assert measures["error"] == "" and measures["same"] == [""]
    assert acts["refused"] == measures["refused"] == 1 and acts["messages"] == measures["messages"]
    # Routes that stock verl would read itself are not decoded.
    assert found["measures routes"] == {"error": "", "refused": 0, "messages": [], "same": ["text of SGLang's"]}
    for name in ("acts bug", "measures bug"):
        assert found[name] == {"error": "AttributeError", "refused": 0, "messages": [], "same": []}
