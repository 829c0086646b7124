"""Bad rows in whole runs of each of verl's modes: a step with them is bit for bit that of loss weight 0 in their place.

Asynchronous modes sample other answers in every run. So a row is spoiled after its batch is drawn, and the driver takes the
step again from the same checkpoint, with the row good and its loss weight 0, and once more with the row good.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.peers.verl.cpu.twice import TWICE
from tests.peers.verl.main_ppo import VerlRun, dtypes, lasting, run_verl
from tests.peers.verl.modes import COLOCATE, SEPARATE

ACTING = "+mismatch.monitor.weight_sync=error"
ALLOWED = "+mismatch.monitor={weight_sync:error,max_bad_rows:1}"
REASON_OF = {
    "rollout": "rollout_logprobs",
    "old": "old_logprobs",
    "reference": "old_logprobs",
    "version": "weight_version",
    "tokens": "tokens",
    "routes": "routes",
    "mask": "mask",
}
Steps = dict[int, dict[int, str]]


def taken_twice(
    work: Path, steps: Steps, *overrides: str, model: str = "dense", planned: int = 3, count: int = 3
) -> tuple[VerlRun, list[Any]]:
    """Run verl with steps that are taken several times; return the run, and what each of these steps has left.

    The run ends well after `count` of the `planned` steps.
    """
    file = work / "twice.jsonl"
    settings = [*dtypes("float32"), *overrides, *lasting(planned)]
    asked = json.dumps({"steps": steps, "file": str(file)})
    run = run_verl(
        work, settings, model=tiny_model(model, work / "model"), plugin=True, timeout=860, env={TWICE: asked}
    )
    run.expect(count)
    return run, [json.loads(line) for line in file.read_text().splitlines()]


def check_steps(run: VerlRun, left: list[Any], steps: Steps, work: Path, *, experts: bool = False) -> None:
    """Check that bad rows are found, counted and kept, and that the step is that of the rows with loss weight 0.

    With `experts` it is so up to rounding: bad rows are not replayed, so that experts may sum the tokens in another order.
    """
    assert [one["step"] for one in left] == list(steps)
    events = [event for event in read_run(work / "checkpoints/mismatch").events if event.name == "bad_rows"]
    for one, kinds in zip(left, steps.values(), strict=True):
        assert {int(row): fault[0] for row, fault in one["bad"].items()} == {
            row: REASON_OF[kind] for row, kind in kinds.items()
        }
        weights, norms = one["weights"], one["norms"]
        if experts:
            assert norms["spoiled"] == pytest.approx(norms["weightless"], rel=1e-6)
            assert one["apart"]["weightless"] <= 1e-3 * one["apart"]["whole"], one["apart"]
        else:
            assert norms["spoiled"] == norms["weightless"] and weights["spoiled"] == weights["weightless"], one
        # The rows would have had a part in the step, and the step has moved the weights.
        assert (
            norms["spoiled"] != norms["whole"] and len({weights[name] for name in ("before", "spoiled", "whole")}) == 3
        )
        for reason, rows in Counter(REASON_OF[kind] for kind in kinds.values()).items():
            assert run.steps[one["step"] - 1][f"mismatch/bad_rows/{reason}"] == rows
            (event,) = [event for event in events if event.step == one["step"] and event.data["reason"] == reason]
            assert event.data["rows"] == rows and "Their loss weight is 0; the run goes on." in event.message
    assert list((work / "checkpoints/mismatch").glob("evidence-*"))


def test_one_bad_row_of_32_goes_on_and_a_fifth_of_them_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """A step with bad rows is that of loss weight 0 bit for bit, also the one after which there are too many of them."""
    fifth = {0: "rollout", 2: "old", 4: "version", 9: "reference", 13: "tokens", 21: "tokens", 30: "rollout"}
    steps: Steps = {1: {3: "rollout"}, 2: fifth}
    run, left = taken_twice(tmp_path, steps, ACTING, "actor_rollout_ref.rollout.n=8", count=2)
    assert [step["rows"] for step in left] == [32, 32]
    check_steps(run, left, steps, tmp_path)
    ended = [event for event in read_run(tmp_path / "checkpoints/mismatch").events if event.level == "error"]
    assert [(event.step, event.name) for event in ended] == [(2, "bad_rows")]
    assert ended[0].message.startswith("8 of the 64 rows of steps 1 to 2 were bad")
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.nightly
def test_each_reason_that_a_mixture_with_masks_has(tmp_path: Path) -> None:
    """With R3 and sampling masks, rows of each reason are found, and the step is that of loss weight 0 up to rounding."""
    steps: Steps = {1: {0: "rollout", 2: "old", 4: "version", 7: "reference", 9: "routes", 14: "mask"}}
    masks = ("+mismatch.sampling_mask={}", "actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_k=8")
    settings = ("+mismatch.routing={mode:R3,measured:1.0}", *masks)
    run, left = taken_twice(tmp_path, steps, ALLOWED, *settings, model="moe", planned=1, count=1)
    check_steps(run, left, steps, tmp_path, experts=True)


# Two passes over a batch: in the first one ratios are 1, and kl_cov's KL has no slope. verl's KL to the reference has no weights.
COMPARING = (
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.ppo_epochs=2",
)
# clip_cov chooses by ratios, which nobody knows of a row whose old log-probability is not finite.
CLIPPED: dict[int, str] = {3: "rollout", 13: "tokens", 21: "version"}
CLIPPING = ("clip_cov_ratio=0.3", "clip_cov_lb=-50", "clip_cov_ub=50")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("loss", "options", "rows"),
    [("clip_cov", CLIPPING, CLIPPED), ("kl_cov", ("kl_cov_ratio=0.3",), CLIPPED | {27: "old"})],
    ids=["clip_cov", "kl_cov"],
)
def test_a_loss_that_compares_tokens_chooses_the_same_ones(
    loss: str, options: tuple[str, ...], rows: dict[int, str], tmp_path: Path
) -> None:
    """Up to a third of the tokens are chosen, so that it matters among which."""
    steps: Steps = {1: rows}
    chosen = [f"actor_rollout_ref.actor.policy_loss.{option}" for option in (f"loss_mode={loss}", *options)]
    run, left = taken_twice(tmp_path, steps, ALLOWED, *COMPARING, *chosen, planned=1, count=1)
    assert [step["rows"] for step in left] == [32]
    check_steps(run, left, steps, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE], ids=["colocate", "separate"])
def test_asynchronous_steps_with_bad_rows_are_those_of_loss_weight_0(mode: tuple[str, ...], tmp_path: Path) -> None:
    steps: Steps = {2: {1: "rollout"}, 3: {0: "rollout", 2: "old", 4: "version", 5: "tokens", 7: "reference"}}
    run, left = taken_twice(tmp_path, steps, ALLOWED, *mode)
    check_steps(run, left, steps, tmp_path)
