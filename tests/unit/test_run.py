"""A run of your own loop: stock numbers without sections, each section's own with it, and an error for what is left out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mismatch_ext import Run
from mismatch_ext.correction import correct
from mismatch_ext.errors import ConfigError, LoopError, MismatchError, PrecisionError, RecordError, WeightSyncError
from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build, judge, load_runs, summarize
from tests.torch_rollout import Recurrent
from tests.unit.loops import (
    KL,
    NOISE,
    PROMPTS,
    learn,
    rewards_of,
    same,
    sides,
    weights,
)

ENDS: dict[str, Any] = {"monitor": {"weight_sync": "error"}}  # a config that acts, and changes no number


def by_hand(steps: int) -> dict[str, Tensor]:
    """Train by a loop without this package's run: torch and the engine."""
    trainer, rollout = sides()
    model, optimizer, scheduler = trainer.model, trainer.optimizer, trainer.scheduler
    for _ in range(steps):
        records = rollout.generate(PROMPTS)
        rows = [torch.tensor([*r.prompt_ids, *r.response_ids]) for r in records]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = [len(r.response_ids) for r in records]
        width = max(lengths)
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        even = torch.tensor([sum(token % 2 == 0 for token in r.response_ids) / len(r.response_ids) for r in records])
        by_prompt = even.view(len(PROMPTS), -1)
        advantages = (by_prompt - by_prompt.mean(1, keepdim=True)).view(-1, 1)
        found = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        scored = []
        for row, record, length in zip(found, records, lengths, strict=True):
            first = len(record.prompt_ids) - 1
            scored.append(nn.functional.pad(row[first : first + length], (0, width - length)))
        logprobs = torch.stack(scored)
        loss = -((logprobs - logprobs.detach()).exp() * advantages)[mask].mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rollout.update(model.named_parameters())
    return weights(trainer)


@pytest.mark.parametrize("block", [None, {}, {"level": "observe", "lr": {"period": 2}}])
def test_an_empty_block_changes_no_bit(block: Any, tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run(block, trainer, rollout, tmp_path).start() as run:
        learn(run, 3)
    assert same(by_hand(3), weights(trainer))


def test_a_run_measures_and_reports(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"lr": {"period": 2}}, trainer, rollout, tmp_path).start() as run:
        logs = learn(run, 3)
    # The engine's noise is the gap: its mean |Δlogp| is of the size of the noise.
    assert all(0.1 * NOISE < log["mismatch/logp_abs_diff_mean"] < 3 * NOISE for log in logs)
    assert [log["mismatch/lr_multiplier"] for log in logs] == [1, 1, 0.5]
    assert all({"reward", "length", "loss", "grad_norm", "mismatch/weight_sync_gap"} <= set(log) for log in logs)
    written = read_run(tmp_path / "mismatch")
    assert [record.step for record in written.steps] == [1, 2, 3]
    assert [end.status for end in written.ends] == ["completed"]
    assert written.header["run"]["host"] == "your own loop" and written.header["engine"]["engine"] == "torch"


@pytest.mark.parametrize(("rate", "told"), [(1e-5, True), (0.05, False)])
def test_a_run_tells_of_updates_that_do_not_reach_the_engine(rate: float, told: bool, tmp_path: Path) -> None:
    trainer, rollout = sides(rate=rate, dtype="bfloat16")
    with warnings.catch_warnings(record=True) as warned, Run({}, trainer, rollout, tmp_path).start() as run:
        warnings.simplefilter("always")
        (*_, log) = learn(run, 4)
    assert (log["mismatch/engine_moved_frac"] < 0.1) == told
    assert any("change in the engine" in str(w.message) for w in warned) == told


def leaving_out(verb: str) -> Callable[[Run], None]:
    """Return a loop of one step that uses everything but a verb."""

    def loop(run: Run) -> None:
        batch = run.batch(run.rollout.generate(PROMPTS))
        with torch.no_grad():
            old, ref = run.score(batch), run.reference(batch)
        if verb != "measure":
            run.measure(batch, old=old, reference=ref)
        if verb != "correct":
            run.correct(batch, old)
        logprobs = run.score(batch)
        term = run.kl(batch, logprobs=logprobs, reference=ref) if verb != "kl" else torch.zeros_like(old)
        loss = -(logprobs * rewards_of(batch)).mean() + (0.0 if verb == "kl in loss" else term.mean())
        run.step(loss)

    return loop


@pytest.mark.parametrize(
    ("verb", "block", "named"),
    [
        ("correct", {"correction": {"preset": "tis"}}, r"step 1: mismatch.correction is on, and run.correct"),
        ("kl", KL, r"step 1: mismatch.kl is on, and no gradient went through"),
        ("kl in loss", KL, r"step 1: mismatch.kl is on, and no gradient went through"),
        ("measure", ENDS, r"step 1: the gap of each batch is measured by run.measure"),
    ],
)
def test_a_verb_that_is_left_out_is_named_before_the_first_step(
    verb: str, block: dict[str, Any], named: str, tmp_path: Path
) -> None:
    trainer, rollout = sides()
    before = weights(trainer)
    with pytest.raises(LoopError, match=named), Run(block, trainer, rollout, tmp_path).start() as run:
        leaving_out(verb)(run)
    assert same(before, weights(trainer))


def test_a_batch_that_is_not_measured_is_named_in_a_run_that_only_measures(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.warns(UserWarning, match="the check 'loop' failed at step 0; .* run.measure"):
        with Run({}, trainer, rollout, tmp_path).start() as run:
            leaving_out("measure")(run)
    assert run.steps == 1


def test_rollouts_before_the_weights_are_sent_are_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.raises(LoopError, match=r"step 1: the trainer's weights have changed .* call run.send\(\)"):
        with Run(ENDS, trainer, rollout, tmp_path).start() as run:
            learn(run, 2, sends=False)
    assert run.steps == 1


def test_an_engine_that_drops_an_update_is_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    rollout.drops_updates = True
    with pytest.raises(WeightSyncError, match="stale"), Run(ENDS, trainer, rollout, tmp_path).start() as run:
        learn(run, 2)
    events = read_run(tmp_path / "mismatch").events
    assert [event.level for event in events if event.name == "weight_sync"] == ["warning", "error"]


@pytest.mark.parametrize(
    ("block", "error", "named"),
    [
        ({"kl": {}}, ConfigError, "mismatch.kl.coef is not given"),
        ({"routing": {"mode": "R3"}}, MismatchError, "no module of the model has experts"),
        ({"precision": {"dtype": "float16"}}, PrecisionError, "engine dtype: expected float16, found float32"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_first_rollout(
    block: dict[str, Any], error: type[Exception], named: str, tmp_path: Path
) -> None:
    trainer, rollout = sides()
    with pytest.raises(error, match=named):
        Run(block, trainer, rollout, tmp_path).start()


def test_without_a_reference_the_kl_term_is_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    trainer.reference = None
    with pytest.raises(ConfigError, match="there is none: TrainedModel"):
        with Run(KL, trainer, rollout, tmp_path).start() as run:
            learn(run, 1)


def test_gradients_that_are_not_finite_raise_their_alarm(tmp_path: Path) -> None:
    trainer, rollout = sides()
    kept = weights(trainer)
    with pytest.warns(UserWarning, match="grad_norm"), Run({}, trainer, rollout, tmp_path).start() as run:
        for _ in range(3):
            batch = run.batch(rollout.generate(PROMPTS))
            with torch.no_grad():
                run.measure(batch, old=run.score(batch))
            run.backward(run.score(batch).mean() * math.nan)
            run.step()
            trainer.model.load_state_dict(kept)
            trainer.optimizer.state.clear()
            run.send()
            assert math.isnan(run.log().metrics["grad_norm"])


def test_copies_of_a_rollout_do_not_cancel_their_own_kl(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"kl": {"coef": 0.1, "baseline": "leave_one_out"}}, trainer, rollout, tmp_path).start() as run:
        best, *_ = rollout.generate(PROMPTS)
        with pytest.raises(RecordError, match="same rollout"):
            run.batch([best] * 4)


def test_the_parts_of_a_loss_are_added(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({}, trainer, rollout, tmp_path).start() as run:
        for parts in (1, 4):
            batch = run.batch(rollout.generate(PROMPTS))
            with torch.no_grad():
                run.measure(batch, old=run.score(batch))
            losses = [run.score(batch).mean() / parts for _ in range(parts)]
            for loss in losses:
                run.backward(loss)
            run.step()
            run.send()
            assert run.log().metrics["loss"] == pytest.approx(losses[0].item() * parts)


def test_weights_are_normalized_over_all_responses_or_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    block = {"correction": {"level": "sequence", "upper": 100, "normalize": True}}
    with Run(block, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        old = run.score(batch).detach()
        expected = correct(
            old_logprobs=old,
            rollout_logprobs=batch.rollout_logprobs,
            response_mask=batch.response_mask,
            config=run.block.correction,  # type: ignore[arg-type]
        )
        assert torch.equal(run.correct(batch, old).weights, expected.weights)
        with pytest.raises(LoopError, match="mismatch.correction.normalize"):
            run.correct(batch.rows(0, 8), old[:8])


def test_each_batch_of_a_step_is_measured_and_corrected(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"correction": {"preset": "tis"}}, trainer, rollout, tmp_path).start() as run:
        first, second = (run.batch(rollout.generate(PROMPTS)) for _ in range(2))
        for batch in (second, first):
            with torch.no_grad():
                old = run.score(batch)
            run.measure(batch, old=old)
            if batch is second:
                run.correct(batch, old)
            run.backward(run.score(batch).mean())
        with pytest.raises(LoopError, match="run.correct"):
            run.step()
        run.correct(first.rows(0, 8), old[:8])
        run.step()
        run.step(run.score(first).mean())  # another epoch over them
        run.send()
        run.batch(rollout.generate(PROMPTS))
        with pytest.raises(LoopError, match="run.measure"):
            run.step(run.score(first).mean())


@pytest.mark.parametrize("parts", [[(0, 16)], [(0, 5), (5, 16)]])
def test_the_kl_controller_moves_once_for_each_batch(parts: list[tuple[int, int]], tmp_path: Path) -> None:
    trainer, rollout = sides()
    trainer.reference = Recurrent(3)
    with Run({"kl": {"coef": 0.1, "target_kl": 1e-3}}, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        for part in (batch.rows(*rows) for rows in parts):
            with torch.no_grad():
                run.measure(part, old=run.score(part), reference=run.reference(part))
            assert run._kl is not None and run._kl.coef == 0.1
        moved = run.state_dict()["kl"]
        run.batch(rollout.generate(PROMPTS))
        assert run._kl.coef == moved["coef"] != 0.1 and run.state_dict()["kl"] == moved
    assert moved["steps"] == 1


def test_weights_of_another_step_do_not_reach_the_engine(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"correction": {"preset": "tis"}}, trainer, rollout, tmp_path).start() as run:
        with torch.no_grad():
            trainer.model.embed.weight.add_(1.0)
        with pytest.raises(LoopError, match=r"and not by run.step\(\)"):
            run.send()
        assert rollout.weight_version == 0


def test_an_optimizer_without_a_trainable_parameter_is_named_at_the_start_and_in_the_report(tmp_path: Path) -> None:
    trainer, rollout = sides()
    for parameter in trainer.model.parameters():
        parameter.requires_grad_(False)
    with pytest.warns(UserWarning, match="no parameter of the optimizer is trainable"):
        Run({}, trainer, rollout, tmp_path).start().end()
    ((name, data),) = load_runs(tmp_path).items()
    judged = judge(name, data, summarize({name: data}))
    assert judged.cause is not None and "is_trainable=True" in judged.cause


@pytest.mark.parametrize("still", [True, False])
def test_weights_that_still_stand_still_at_the_end_are_in_the_report(still: bool, tmp_path: Path) -> None:
    trainer, rollout = sides(rate=0.0)
    with pytest.warns(UserWarning, match="the last 3 weight updates sent the same weights"):
        run = Run({}, trainer, rollout, tmp_path).start()
        learn(run, 4)
        if not still:
            for group in trainer.optimizer.param_groups:
                group["lr"] = 0.1
            learn(run, 2)
    run.end()
    (verdict,) = build(tmp_path).to_dict()["runs"].values()
    assert any("sent the same weights" in warning for warning in verdict["warnings"]) == still


def test_a_baseline_over_no_other_response_is_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    block = {"kl": {"coef": 0.1, "baseline": "leave_one_out", "placement": "both"}}
    with Run(block, trainer, rollout, tmp_path).start() as run:
        part = run.batch(rollout.generate(PROMPTS)).rows(0, 1)
        with pytest.raises(LoopError, match="this part of a batch has one response of each prompt"):
            run.kl(part, logprobs=run.score(part), reference=run.reference(part))
