"""A row that cannot be trained on: the run goes on as if the row had loss weight 0, counts it by reason, and keeps evidence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_bad_rows as scenarios
    from tests.peers.trl import scenarios_bad_runs as runs
else:
    runs = named("tests.peers.trl.scenarios_bad_runs")
    scenarios = named("tests.peers.trl.scenarios_bad_rows")

pytestmark = pytest.mark.engine
ALL = {"monitor": {"weight_sync": "error", "default_alarms": False, "metrics": "all", "max_bad_rows": 1.0}}
MANY = {"per_device_train_batch_size": 32, "num_generations": 4}


def without_weight(row: list[float]) -> bool:
    return all(value == 0 for value in row)


def test_in_each_of_trls_losses_a_bad_row_has_no_slope_and_the_others_keep_theirs(run: Run) -> None:
    found = run(scenarios.levers).expect()
    assert len(found) == 80
    for name, (stock, taken_out) in found.items():
        assert taken_out["own"] == [0.0, 0.0], name
        # In other cases the made-up row may be clipped or masked by TRL itself.
        assert max(stock["own"]) > 0 or not name.endswith((", plain", ", kl", ", kl and accumulation")), name
        assert taken_out["others"] == stock["others"], name
        assert any(not without_weight(row) for row in taken_out["others"][0]), name
        assert math.isfinite(taken_out["loss"]), name
        assert all(map(math.isfinite, taken_out["logged"].values())), (name, taken_out["logged"])


def test_of_rows_with_equal_tokens_either_all_are_bad_or_none_is(run: Run) -> None:
    found = run(scenarios.alike).expect()
    assert found["bad"].pop("0") == ["routes", "row 0 has the tokens of row 1, which is bad: it lost them"]
    assert sorted(found["bad"]) == ["1", "3"]  # a completion without tokens has no loss weight in any case
    assert found["judged"] == [True, True, False, True, True]


def check_finite(logged: list[dict[str, Any]]) -> None:
    """Check that whatever was logged is a number: what is left of a bad row has a part in TRL's own metrics."""
    for entry in logged:
        assert all(math.isfinite(value) for value in entry.values() if isinstance(value, float)), entry


def check_step(found: dict[str, Any], fault: str, reason: str, rows: int) -> None:
    """Check that a run with a fault is the one without, whose rows have loss weight 0, and that it counts them."""
    stock, spoiled = found["None"], found[fault]
    assert spoiled["parameters"] == stock["parameters"], fault
    assert spoiled["steps"] == stock["steps"] and stock["events"] == []
    counts = [entry.get(f"mismatch/bad_rows/{reason}") for entry in spoiled["logged"]]
    assert counts == [None, rows, 0.0], (fault, counts)
    assert all(not name.startswith("mismatch/bad_rows/") for entry in stock["logged"] for name in entry)
    check_finite(spoiled["logged"])
    for (level, message), bad in zip(spoiled["events"], [rows], strict=True):
        assert level == "warning" and message.startswith(f"{bad} bad rows ({reason}) before step 2")
    assert spoiled["kept"] == ["evidence-2.jsonl.gz"], fault
    assert spoiled["logged"][1]["mismatch/tokens"] < stock["logged"][1]["mismatch/tokens"]


@pytest.mark.numeric
def test_a_log_probability_that_the_engine_lacks_in_rloo(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(
        scenarios.compared, model=dense, out=tmp_path, block=ALL, faults=["nan"], bad_rows=[5], batches=[2], rloo=True,
        beta=0.1, **MANY,
    ).expect()  # fmt: skip
    check_step(found, "nan", "rollout_logprobs", 1)


ROUTED = ALL | {
    "routing": {"mode": "R3", "measured": 1.0},
    "kl": {"coef": 0.05, "baseline": "none"},
    "correction": {"preset": "token_truncate"},
}


@pytest.mark.numeric
def test_routes_that_are_missing_or_too_short(run: Run, moe: Path, tmp_path: Path) -> None:
    """The model routes the row itself. Without an auxiliary loss, which has no loss weights, that changes nothing."""
    found = run(
        scenarios.compared, model=moe, out=tmp_path, block=ROUTED, faults=["no routes", "short routes"], bad_rows=[3],
        batches=[2], model_init_kwargs={"experts_implementation": "eager"}, num_iterations=2, max_steps=4,
        router_aux_loss_coef=0.0,
    ).expect()  # fmt: skip
    for fault in ("no routes", "short routes"):
        stock, spoiled = found["None"], found[fault]
        assert spoiled["parameters"] == stock["parameters"] and stock["events"] == []
        assert sum(entry.get("mismatch/bad_rows/routes", 0) for entry in spoiled["logged"]) == 1
        assert spoiled["kept"] == ["evidence-3.jsonl.gz"]


def test_too_many_end_an_acting_run_with_a_checkpoint(run: Run, dense: Path, tmp_path: Path) -> None:
    block = {"monitor": {"weight_sync": "error", "default_alarms": False}}
    found = run(
        scenarios.trained, model=dense, out=tmp_path, block=block, fault="nan", bad_rows=[2, 5], batches=[2, 3],
        max_steps=6,
    ).expect()  # fmt: skip
    assert found["steps"] == 3 and found["checkpoints"] == ["checkpoint-3"]
    assert [level for level, _ in found["events"]] == ["warning", "warning", "error"]
    assert "4 of the 24 rows of steps 1 to 3 were bad" in found["events"][-1][1]
    assert found["kept"] == ["evidence-2.jsonl.gz", "evidence-3.jsonl.gz"]


@pytest.mark.numeric
def test_one_row_of_32_for_each_reason_leaves_the_others_as_they_were(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(
        runs.reasons, model=dense, out=tmp_path, block=ALL | {"sampling_mask": {}}, top_k=6, beta=0.1, **MANY
    ).expect()
    faulty, weightless = found["faulty"], found["weightless"]
    assert faulty["parameters"] == weightless["parameters"] and len(set(faulty["parameters"])) == 6
    check_finite(faulty["logged"])
    reasons = ("rollout_logprobs", "mask", "old_logprobs", "tokens", "weight_version")
    assert faulty["said"] == [{"reason": reason, "rows": 1} for reason in reasons] and weightless["said"] == []
    for step, reason in enumerate(reasons, 1):
        counts = [entry.get(f"mismatch/bad_rows/{reason}") for entry in faulty["logged"]]
        assert counts == [None] * step + [1.0] + [0.0] * (5 - step), reason


@pytest.mark.numeric
@pytest.mark.parametrize("rloo", [False, True], ids=["GRPO", "RLOO"])
def test_a_batch_that_is_nowhere_finite_moves_no_weight_and_ends_an_acting_run_with_a_checkpoint(
    run: Run, dense: Path, tmp_path: Path, rloo: bool
) -> None:
    block = {"monitor": {"weight_sync": "error", "default_alarms": False}}
    found = run(runs.not_finite, model=dense, out=tmp_path, block=block, rloo=rloo).expect()
    assert found["error"] == "" and found["steps"] == 2 and found["checkpoints"] == ["checkpoint-2"]
    _, first, second = found["parameters"]
    assert first == second and found["kept"] == ["evidence-2.jsonl.gz"]
    assert found["said"][0].startswith(
        "8 bad rows (old_logprobs) before step 2, such as: row 0, token 0: the trainer's"
    )
    assert found["said"][1].startswith("8 of the 16 rows of steps 1 to 2 were bad")


@pytest.mark.numeric
def test_a_batch_that_is_nowhere_finite_lowers_no_loss_scale_however_many_steps_it_takes(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    block = ALL | {"precision": {"dtype": "float16", "init_scale": 1024.0}}
    found = run(
        runs.not_finite, model=dense, out=tmp_path, block=block, spoiled=1, num_iterations=22, max_steps=24
    ).expect()
    assert found["error"] == "" and found["skipped"] == 22 and found["scale"] == 1024.0
    *skipped, first, second = found["parameters"]
    assert len(set(skipped)) == 1 and len({skipped[-1], first, second}) == 3


@pytest.mark.numeric
def test_a_run_ends_if_every_batch_has_a_step_without_finite_gradients(run: Run, dense: Path, tmp_path: Path) -> None:
    block = ALL | {"precision": {"dtype": "float16", "init_scale": 1024.0}}
    found = run(runs.never_finite, model=dense, out=tmp_path, block=block).expect()
    assert found["error"].startswith("NonFiniteLogprobError: the gradients of 20 batches in a row were not finite")
    assert found["steps"] == 19 and found["moved"] is False


@pytest.mark.numeric
@pytest.mark.parametrize(
    "section",
    [{"kl": {"coef": 0.1}}, {"sampling_mask": {}}, {"correction": {"preset": "bypass_pg_is"}}],
    ids=["kl", "mask", "reinforce"],
)
def test_a_scaler_skips_a_step_whose_loss_a_section_finds_not_finite(
    run: Run, dense: Path, tmp_path: Path, section: dict[str, Any]
) -> None:
    block = ALL | section | {"precision": {"dtype": "float16", "init_scale": 1024.0}}
    found = run(runs.not_finite_in_loss, model=dense, out=tmp_path, block=block, top_k=6).expect()
    first, second, third = found["parameters"]
    assert found["skipped"] == 1 and first == second and second != third


@pytest.mark.numeric
@pytest.mark.parametrize("again", [2, 4])
def test_a_row_that_is_trained_on_with_a_later_batch_stays_bad(
    run: Run, dense: Path, tmp_path: Path, again: int
) -> None:
    found = run(runs.carried_over, model=dense, out=tmp_path, block=ALL | {"kl": {"coef": 0.1}}, again=again).expect()
    parameters = found["nan"]["parameters"]
    assert parameters == found["None"]["parameters"] and len(set(parameters)) == again + 1


def test_a_pass_that_a_users_class_takes_around_ours_trains_on_no_bad_row(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    found = run(runs.handled, model=dense, out=tmp_path, block=ALL).expect()
    assert found["error"] == "" and found["finite"] and found["constants"] == [0, 1, 0]


@pytest.mark.numeric
def test_a_pass_of_a_users_own_over_some_rows_of_a_batch_is_not_taken_for_the_batch(
    run: Run, moe: Path, tmp_path: Path
) -> None:
    found = run(
        runs.of_a_user, model=moe, out=tmp_path, block={"routing": {"mode": "R3"}},
        model_init_kwargs={"experts_implementation": "eager"},
    ).expect()  # fmt: skip
    assert found["replayed"] == found["known"] == 1


@pytest.mark.numeric
def test_a_batch_that_is_chosen_from_several_generations_may_have_a_bad_row(
    run: Run, moe: Path, tmp_path: Path
) -> None:
    found = run(
        runs.oversampled, model=moe, out=tmp_path, block=ALL | {"routing": {"mode": "R3"}},
        model_init_kwargs={"experts_implementation": "eager"},
    ).expect()  # fmt: skip
    assert found["bad"] == [None, 1.0, 0.0] and found["other passes"] == [0.0] * 3


def test_a_full_disk_ends_no_run_and_its_checkpoints_are_whole(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(runs.full_disk, model=dense, out=tmp_path, block=ALL).expect()
    assert found["steps"] == 5 and found["end"] == "completed"
    # The metrics of steps 2 and 3, and that a row of step 3 was bad.
    assert found["written"] == [1, 4, 5] and found["lost"] == [{"lines": 3}]
    # The bad row of step 3 was counted all the same, and no evidence of it could be kept.
    assert found["counted"] == [None, None, 1.0, 0.0, 0.0] and found["evidence"] == []
    assert found["states"] == [True, False, False, True, True]
    assert found["saved"] == 3 and found["resumed"] == 5 and found["resumed status"] == "in_sync"


@pytest.mark.numeric
def test_the_length_that_leads_the_rate_is_that_of_rows_that_are_not_bad(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(runs.lengths, model=dense, out=tmp_path, block=ALL | {"lr": {"trigger": "response_length"}}).expect()
    whole, others, _ = found["sampled"]
    first, second, _ = (led["response_length"] for led in found["led"])
    assert [led["responses"] for led in found["led"]] == [8, 7, 8]  # by which batches of one step are weighed
    bad = others.pop(5)
    assert bad != sum(others) / len(others)  # so that it would show
    assert first == pytest.approx(sum(whole) / len(whole)) and second == pytest.approx(sum(others) / len(others))
