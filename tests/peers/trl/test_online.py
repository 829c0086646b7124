"""TRL's other online trainers with the block: RLOO, and GMPO, which derives from GRPO."""

from __future__ import annotations

from pathlib import Path

from tests.oracle import expect_float32
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_online")

BLOCK = {
    "precision": {"dtype": "float32"},
    "routing": {"mode": "R3", "measured": 1.0},
    "lr": {"period": 1},
}


def test_rloo_in_float32_agrees_with_its_engine_and_routes_as_it(run: Run, moe: Path, tmp_path: Path) -> None:
    ran = run(scenarios.rloo, model=moe, out=tmp_path, block=BLOCK)
    history = ran.expect()["history"]
    expect_float32(history, ran.expect()["float32_errors"])
    assert [entry["mismatch/lr_multiplier"] for entry in history] == [1.0, 0.5, 0.25]
    for entry in history:
        assert entry["mismatch/routing/set_mismatch_frac"] == 0.0
        # All 8 responses are 16 tokens long at most, and each token is compared.
        assert entry["mismatch/tokens"] == 8 * entry["completions/mean_length"]


def test_rloo_with_a_block_that_changes_nothing_is_stock(run: Run, dense: Path, tmp_path: Path) -> None:
    given = {"model": dense, "use_vllm": False}
    stock = run(scenarios.rloo, out=tmp_path / "stock", **given).expect()
    ours = run(scenarios.rloo, out=tmp_path / "ours", block={"lr": {"period": 100}}, **given).expect()
    assert ours["parameters"] == stock["parameters"]
    assert [entry["loss"] for entry in ours["history"]] == [entry["loss"] for entry in stock["history"]]


def test_gmpo_takes_what_its_loss_has_a_seam_for(run: Run, moe: Path, tmp_path: Path) -> None:
    ran = run(scenarios.gmpo, model=moe, out=tmp_path, block=BLOCK)
    history = ran.expect()["history"]
    expect_float32(history, ran.expect()["float32_errors"])
    last = history[-1]
    assert last["mismatch/lr_multiplier"] == 0.25
    assert last["mismatch/routing/set_mismatch_frac"] == 0.0
