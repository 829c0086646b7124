"""A bad row of your own loop: its loss weight is 0, the other rows' gradients stay as they are, and it is counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext import Run
from mismatch_ext.bad_rows import Fault
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.events import BAD_ROW_REASONS
from mismatch_ext.presets import PRESETS, resolve
from mismatch_ext.rollout import Batch, RolloutRecord, record_of
from tests.models import tiny_model
from tests.unit.loops import PROMPTS, moe_sides, rewards_of, same, sides, weights

ACTS: dict[str, Any] = {"monitor": {"weight_sync": "error"}}
BAD = 5
MICRO_BATCH = 4
Change = Callable[[list[RolloutRecord]], list[RolloutRecord]]


def without(record: RolloutRecord, reason: str) -> RolloutRecord:
    """Return a record as an engine's side makes it of a row that is bad for a reason."""
    if reason == "rollout_logprobs":
        fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
        return record_of(**fields | {"rollout_logprobs": (math.nan,) * len(record.response_ids)})
    if reason == "weight_version":
        return replace(record, provenance=replace(record.provenance, weight_version=7))
    if reason == "routes":
        return replace(record, routing=None, fault=Fault(reason=reason, message="routes of other tokens."))
    return replace(record, fault=Fault(reason=reason, message=f"{reason} do not fit."))


def spoil(rows: set[int], reason: str) -> Change:
    """Return a function that makes rows bad."""
    return lambda records: [without(r, reason) if row in rows else r for row, r in enumerate(records)]


def gradient(
    run: Run, change: Change, loss_weights: dict[int, float], *, old_nan: set[int] = frozenset(), native: bool = False
) -> tuple[list[Tensor], Batch]:
    """Return the gradient of a step over micro-batches, with a loss weight for each row, and the step's batch."""
    batch = run.batch(change(run.rollout.generate(PROMPTS)))
    if native:
        assert batch.routing is not None
        batch.routing = [
            replace(t, parts=(t.parts[0][:0],), start=t.start + t.rows, tokens=t.tokens) if row in loss_weights else t
            for row, t in enumerate(batch.routing)
        ]
    with torch.no_grad():
        old, ref = run.score(batch), run.reference(batch)
    old = old.clone()
    old[list(old_nan)] = math.nan
    run.measure(batch, old=old, reference=ref)
    advantages = rewards_of(batch)
    correction = run.correct(batch, old, advantages=advantages[:, 0]).as_multiplier()
    penalty = run.penalty(batch, old=old, reference=ref)
    row_weights = torch.tensor([loss_weights.get(row, 1.0) for row in range(len(batch))]).view(-1, 1)
    tokens = batch.response_mask.sum()
    for first in range(0, len(batch), MICRO_BATCH):
        rows = slice(first, first + MICRO_BATCH)
        part = batch.rows(first, first + MICRO_BATCH)
        logprobs = run.score(part)
        ratio = (logprobs - old[rows]).exp()
        policy = correction[rows] * ratio * (advantages - penalty)[rows]
        term = run.kl(part, logprobs=logprobs, reference=ref[rows]) - policy
        # As a host does: a weight multiplies a term, and what is not sampled is left out.
        run.backward(torch.where(part.response_mask, row_weights[rows] * term, 0.0).sum() / tokens)
    parameters = [parameter for _, parameter in run.trainer.named_parameters()]
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None], batch


BLOCKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "kl in loss": {"kl": {"coef": 0.1, "baseline": "none"}},
    "kl in rewards": {"kl": {"coef": 0.1, "estimator": "k1", "reward_path": "rewards"}},
    **{
        preset: {"correction": {"preset": preset}}
        for preset in PRESETS
        if not resolve(MismatchConfig.parse({"correction": {"preset": preset}}).correction).normalize  # type: ignore[union-attr, arg-type]
    },
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_bad_row_has_loss_weight_0_and_the_others_their_gradients(block: dict[str, Any], tmp_path: Path) -> None:
    gradients = []
    for name, change, loss_weights in (
        ("bad", spoil({BAD}, "rollout_logprobs"), {}),
        ("weight 0", list, {BAD: 0.0}),
        ("whole", list, {}),
    ):
        run = Run(ACTS | block, *sides(), tmp_path / name).start()
        gradients.append(gradient(run, change, loss_weights)[0])
        run.step()
        run.end()
    assert all(map(torch.equal, gradients[0], gradients[1]))
    if not block.get("correction"):  # a correction may have rejected the row anyway
        assert not all(map(torch.equal, gradients[0], gradients[2]))


CASES = [(reason, share) for reason in sorted(BAD_ROW_REASONS) for share in (1 / 16, 0.25, 1.0)]
CASES.remove(("weight_version", 1.0))  # a whole batch of other weights is an error


@pytest.mark.parametrize("share", [1 / 16, 0.25])
@pytest.mark.parametrize("reason", sorted(BAD_ROW_REASONS))
def test_bad_rows_of_each_reason_have_no_gradient_and_are_counted(reason: str, share: float, tmp_path: Path) -> None:
    rows = set(range(0, 16, round(1 / share)))
    old_nan = rows if reason == "old_logprobs" else frozenset()
    change = list if old_nan else spoil(rows, reason)
    bad = Run(ACTS, *sides(), tmp_path / "bad").start()
    found, _ = gradient(bad, change, {}, old_nan=old_nan)
    bad.step()
    bad.send()
    logged = bad.log()
    assert logged.metrics[f"mismatch/bad_rows/{reason}"] == len(rows)
    assert (logged.stop is not None) == (len(rows) >= 3)
    bad.end()
    weighed, _ = gradient(Run(ACTS, *sides(), tmp_path / "weight 0").start(), list, dict.fromkeys(rows, 0.0))
    assert all(map(torch.equal, found, weighed))


def test_a_config_that_only_measures_counts_bad_rows_and_changes_nothing(tmp_path: Path) -> None:
    trained = []
    for name, change in (("bad", spoil({BAD}, "tokens")), ("good", list)):
        run = Run({}, *sides(), tmp_path / name).start()
        gradient(run, change, {})
        run.step()
        trained.append(weights(run.trainer))  # type: ignore[arg-type]
        logged = run.log()
        assert logged.metrics.get("mismatch/bad_rows/tokens") == (1 if name == "bad" else None)
        assert logged.stop is None
        run.end()
    assert same(*trained)


def test_statistics_leave_bad_rows_out(tmp_path: Path) -> None:
    run = Run(ACTS | {"kl": {"coef": 0.1}, "correction": {"preset": "tis"}}, *sides(), tmp_path).start()
    _, batch = gradient(run, spoil({BAD}, "rollout_logprobs"), {})
    run.step()
    log = run.log().metrics
    run.end()
    lengths = batch.lengths.tolist()
    good = [length for row, length in enumerate(lengths) if row != BAD]
    assert log["mismatch/tokens"] == sum(good)
    assert log["mismatch/logp_abs_diff_max"] < 1  # the row's value in place of its NaN is far from the trainer's
    assert log["length"] == pytest.approx(sum(good) / len(good))


def test_a_kl_baseline_leaves_bad_rows_out(tmp_path: Path) -> None:
    run = Run(ACTS | {"kl": {"coef": 1.0, "estimator": "k1"}}, *sides(), tmp_path).start()
    batch = run.batch(spoil({BAD}, "tokens")(run.rollout.generate(PROMPTS)))
    terms = run.kl(batch, logprobs=run.score(batch), reference=run.reference(batch) - 0.5)
    others = (batch.groups == batch.groups[BAD]) & (torch.arange(len(batch)) != BAD)
    assert not terms[BAD].any() and bool(terms[others].any(1).all())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("moe", tmp_path_factory.mktemp("models") / "moe")


@pytest.mark.parametrize("reason", ["rollout_logprobs", "routes", "weight_version"])
def test_a_bad_row_under_replay_leaves_the_others_their_routes(reason: str, moe: Path, tmp_path: Path) -> None:
    found = []
    block = ACTS | {"routing": {"mode": "R3", "measured": 1.0}, "kl": {"coef": 0.1, "baseline": "none"}}
    for name, change, loss_weights in (("bad", spoil({BAD}, reason), {}), ("weight 0", list, {BAD: 0.0})):
        run = Run(block, *moe_sides(moe, dtype="bfloat16"), tmp_path / name).start()
        own_routes = name == "weight 0" and reason != "rollout_logprobs"
        found.append(gradient(run, change, loss_weights, native=own_routes)[0])
        run.step()
        metrics = run.log().metrics
        assert metrics.get(f"mismatch/bad_rows/{reason}") == (1 if name == "bad" else None)
        run.end()
    assert all(map(torch.equal, *found))


def test_a_batch_of_other_weights_alone_is_an_error(tmp_path: Path) -> None:
    run = Run(ACTS, *sides(), tmp_path).start()
    with pytest.raises(RecordError, match="weight version 7, but the engine is at 0"):
        run.batch(spoil(set(range(16)), "weight_version")(run.rollout.generate(PROMPTS)))


def test_a_pass_of_the_trainer_that_is_not_finite_ends_a_run_before_the_step(tmp_path: Path) -> None:
    trainer, rollout = sides()
    run = Run(ACTS, trainer, rollout, tmp_path).start()
    batch = run.batch(rollout.generate(PROMPTS))
    with torch.no_grad():
        run.measure(batch, old=run.score(batch))
    with torch.no_grad():
        next(trainer.model.parameters())[:] = math.nan
    with pytest.raises(NonFiniteLogprobError, match="step 1: row 0, token 0: the trainer's log-probability is nan"):
        run.step(run.score(batch)[batch.response_mask].mean())
    assert run.steps == 0
