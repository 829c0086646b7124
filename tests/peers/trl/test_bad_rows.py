"""A row that cannot be trained on: the run goes on as if the row had loss weight 0, counts it by reason, and keeps evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peers.scenarios import Run, named

runs = named("tests.peers.trl.scenarios_bad_runs")
scenarios = named("tests.peers.trl.scenarios_bad_rows")

pytestmark = pytest.mark.engine
MANY = {"per_device_train_batch_size": 32, "num_generations": 4}


def test_in_each_of_trls_losses_a_bad_row_has_no_slope_and_the_others_keep_theirs(run: Run) -> None:
    run(scenarios.levers).expect()


def test_of_rows_with_equal_tokens_either_all_are_bad_or_none_is() -> None:
    """What an image shows is in no token; a completion without tokens has no loss weight in any case."""
    from mismatch_ext.adapters.trl.bad_rows import include_equal_rows
    from mismatch_ext.adapters.trl.rows import row_key

    from mismatch_ext.bad_rows import BadRows

    keys = [row_key([1], [2, 3]), row_key([1], [2, 3]), row_key([1], [2]), row_key([4], []), row_key([4], [])]
    bad = BadRows(len(keys))
    bad.add(1, "routes", "it lost them")
    bad.add(3, "tokens", "it has none")
    include_equal_rows(bad, keys)
    assert sorted(bad.faults) == [0, 1, 3]
    assert bad.faults[0].message == "row 0 has the tokens of row 1, which is bad: it lost them"


@pytest.mark.numeric
def test_a_log_probability_that_the_engine_lacks_in_rloo(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.missing_logprob, model=dense, out=tmp_path, **MANY).expect()


@pytest.mark.numeric
def test_routes_that_are_too_short(run: Run, moe: Path, tmp_path: Path) -> None:
    run(scenarios.short_routes_of_a_row, model=moe, out=tmp_path).expect()


def test_too_many_end_an_acting_run_with_a_checkpoint(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.too_many, model=dense, out=tmp_path).expect()


@pytest.mark.numeric
def test_one_row_of_32_for_each_reason_leaves_the_others_as_they_were(run: Run, dense: Path, tmp_path: Path) -> None:
    run(runs.reasons, model=dense, out=tmp_path, top_k=6, beta=0.1, **MANY).expect()


@pytest.mark.numeric
def test_a_batch_that_is_nowhere_finite_moves_no_weight_and_ends_an_acting_run(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    run(runs.not_finite, model=dense, out=tmp_path).expect()


@pytest.mark.numeric
def test_a_batch_that_is_nowhere_finite_lowers_no_loss_scale(run: Run, dense: Path, tmp_path: Path) -> None:
    run(runs.not_finite_in_many_steps, model=dense, out=tmp_path).expect()


@pytest.mark.numeric
def test_a_run_ends_if_every_batch_has_a_step_without_finite_gradients(run: Run, dense: Path, tmp_path: Path) -> None:
    run(runs.never_finite, model=dense, out=tmp_path).expect()


@pytest.mark.numeric
@pytest.mark.parametrize(
    "section",
    [{"kl": {"coef": 0.1}}, {"sampling_mask": {}}, {"correction": {"preset": "bypass_pg_is"}}],
    ids=["kl", "mask", "reinforce"],
)
def test_a_scaler_skips_a_step_whose_loss_a_section_finds_not_finite(
    run: Run, dense: Path, tmp_path: Path, section: dict[str, Any]
) -> None:
    run(runs.not_finite_in_loss, model=dense, out=tmp_path, section=section).expect()


@pytest.mark.numeric
@pytest.mark.parametrize("again", [2, 4])
def test_a_row_that_is_trained_on_with_a_later_batch_stays_bad(
    run: Run, dense: Path, tmp_path: Path, again: int
) -> None:
    run(runs.carried_over, model=dense, out=tmp_path, again=again).expect()


def test_a_full_disk_ends_no_run_and_its_checkpoints_are_whole(run: Run, dense: Path, tmp_path: Path) -> None:
    run(runs.full_disk, model=dense, out=tmp_path).expect()


@pytest.mark.numeric
def test_the_length_that_leads_the_rate_is_that_of_rows_that_are_not_bad(run: Run, dense: Path, tmp_path: Path) -> None:
    run(runs.lengths, model=dense, out=tmp_path).expect()
