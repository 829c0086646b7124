"""verl's own trainer without a block: with this package installed, and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.verl.main_ppo import VerlRun, dtypes, lasting, run_verl

pytestmark = pytest.mark.engine

TIMES = ("timing_", "perf/", "actor/perf/")
"""Metrics of time and memory, which differ from run to run."""


@pytest.fixture(scope="module")
def stock(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Return two steps of verl without this package, in bfloat16 on both sides."""
    overrides = [*dtypes("bfloat16"), *lasting(2)]
    return run_verl(tmp_path_factory.mktemp("stock"), overrides, model=dense, plugin=False)


def test_installed_without_a_block_changes_no_number(stock: VerlRun, dense: Path, tmp_path: Path) -> None:
    installed = run_verl(tmp_path, [*dtypes("bfloat16"), *lasting(2)], model=dense, plugin=True)
    assert numbers(installed) == numbers(stock)
    assert installed.reports is None


def numbers(run: VerlRun) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if not name.startswith(TIMES)} for step in run.expect(2)]
