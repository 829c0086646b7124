"""The `sampling_mask` section in the real TRL with vLLM: gap, gradient, reference and warning under each kind of truncation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_sampling_mask")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]


def test_the_ratio_is_one_over_what_the_engine_sampled_from(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.settings, model=dense, out=tmp_path).expect()


def test_parts_are_scored_over_their_masks_and_a_loss_of_other_tokens_is_refused(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    run(scenarios.parts, model=dense, out=tmp_path).expect()


def test_masks_follow_their_tokens_however_the_head_comes_to_them(run: Run) -> None:
    run(scenarios.orders).expect()
