"""KL terms under the denominators of losses, where responses differ in length."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch_ext.config import KlConfig
from mismatch_ext.kl import ragged_bias
from tests.oracles.kl import ragged


def test_the_table_is_what_enumeration_gives(capsys: pytest.CaptureFixture[str]) -> None:
    found = {name: row.values() for name, row in ragged.table().items()}
    assert max(found["sum of tokens, over a constant"]) < 1e-6
    assert max(found["mean over tokens, B = 128"]) < 0.01
    assert min(found["mean over tokens of a response, any B"]) > 0.25
    ragged.main()
    assert capsys.readouterr().out in (Path(__file__).resolve().parents[2] / "evidence" / "kl.md").read_text("utf-8")


def test_only_a_term_in_the_loss_is_warned_of() -> None:
    assert "loss_type" in (ragged_bias(KlConfig(coef=0.1), "loss_type='grpo'", "another") or "")
    rewards = KlConfig(coef=0.1, placement="reward", reward_path="rewards", baseline="none")
    assert ragged_bias(rewards, "x", "y") is None and ragged_bias(None, "x", "y") is None
