"""verl's asynchronous modes in longer runs: stock without a block."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.peers.verl.main_ppo import dtypes, run_verl
from tests.peers.verl.modes import COLOCATE, IN_TURN, SEPARATE

pytestmark = pytest.mark.nightly

TIMES = ("timing_", "perf/", "actor/perf/")
"""Metrics of time and memory, which differ from run to run."""


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE], ids=["colocate_async", "separate_async"])
def test_without_a_block_a_mode_is_stock(mode: tuple[str, ...], tmp_path: Path) -> None:
    """In verl's asynchronous modes, the package without a block changes no number."""
    model = tiny_model("dense", tmp_path / "model")
    # Which answers make a batch hangs on when they end; here each batch is of the prompts that were asked for last.
    overrides = [*dtypes("bfloat16"), *mode, *IN_TURN, "trainer.total_training_steps=2"]
    stock, installed = (
        run_verl(
            tmp_path / str(plugin), overrides, model=model, plugin=plugin, env={"VERL_LOGGING_LEVEL": "WARN"}
        ).expect(2)
        for plugin in (False, True)
    )
    assert numbers(installed) == numbers(stock)
    assert all(step["actor/grad_norm"] > 0 for step in stock)


def numbers(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if not name.startswith(TIMES)} for step in steps]
