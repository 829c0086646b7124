"""A run of a loop of one's own: stock numbers without sections, each section's own with it, and an error for what is left out."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.transformers.side import TrainedModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mismatch_ext import Run
from mismatch_ext.correction import correct
from mismatch_ext.errors import (
    ConfigError,
    LoopError,
    MismatchError,
    PrecisionAuditError,
    ProvenanceError,
    RecordError,
    RoutingError,
    WeightSyncError,
)
from mismatch_ext.run import Batch, LoopRollout, LoopTrainer, RolloutSide, TrainerSide
from mismatch_ext.run.measuring import findings_of_ranks
from mismatch_ext.rundata import read_run
from mismatch_ext.verdicts import Finding
from tests.models import tiny_model
from tests.torch_rollout import VOCABULARY, Recurrent, TorchRollout, recurrent_logits

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 1]]
NOISE = 0.05


def sides(
    seed: int = 0, *, noise: float = NOISE, rate: float = 0.05, **options: Any
) -> tuple[TrainedModel, TorchRollout]:
    """Return a small model with optimizer and schedule, and an engine with the same weights."""
    model, reference = Recurrent(seed), Recurrent(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 10)
    trainer = TrainedModel(model, optimizer, scheduler, reference=reference, logits=recurrent_logits)
    return trainer, TorchRollout(model, recurrent_logits, noise=noise, seed=seed, **options)


def rewards_of(batch: Batch) -> Tensor:
    """Return how many even tokens a response has, less its group's mean."""
    texts = [record.response_ids for record in batch.records]
    rewards = torch.tensor([sum(token % 2 == 0 for token in ids) / len(ids) for ids in texts])
    return (rewards.view(len(PROMPTS), -1) - rewards.view(len(PROMPTS), -1).mean(1, keepdim=True)).view(-1, 1)


def learn(run: Run, steps: int, *, sends: bool = True, checkpoint: Path | None = None) -> list[dict[str, float]]:
    """Run the loop; the same whatever the block asks for."""
    logs = []
    for _ in range(steps):
        batch = run.batch(run.rollout.generate(PROMPTS))
        with torch.no_grad():
            old, ref = run.score(batch), run.reference(batch)
        run.measure(batch, old, ref)
        advantages = rewards_of(batch)
        weights = run.correct(batch, old, advantages=advantages[:, 0]).as_multiplier()
        logprobs = run.score(batch)
        ratio = (logprobs - old).exp()
        loss = (run.kl(batch, logprobs, ref) - weights * ratio * advantages)[batch.response_mask].mean()
        run.step(loss, max_norm=1.0)
        if sends:
            run.send()
        logs.append(run.log(reward=advantages).metrics)
        if checkpoint is not None:
            save(run, checkpoint)
    return logs


def save(run: Run, folder: Path) -> None:
    """Save as a user does: the model's own state first."""
    trainer: Any = run.trainer
    folder.mkdir(exist_ok=True)
    parts = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "trainer.pt")
    run.save(folder)


def weights(trainer: TrainedModel) -> dict[str, Tensor]:
    """Return a copy of the weights."""
    return {name: tensor.detach().clone() for name, tensor in trainer.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Tell whether weights are equal in every bit."""
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def by_hand(
    steps: int, loss_of: Callable[[nn.Module, Any, Tensor, Tensor, Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Train by a loop without this package's run: torch, the engine, and the loss given."""
    trainer, rollout = sides()
    model, optimizer, scheduler = trainer.model, trainer.optimizer, trainer.scheduler
    for _ in range(steps):
        records = rollout.generate(PROMPTS)
        rows = [torch.tensor([*r.prompt_ids, *r.response_ids]) for r in records]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        width = max(len(r.response_ids) for r in records)

        def scored(
            model: nn.Module = model, tokens: Tensor = tokens, width: int = width, records: Any = records
        ) -> Tensor:
            found = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            parts = [
                nn.functional.pad(row[len(r.prompt_ids) - 1 :][: len(r.response_ids)], (0, width - len(r.response_ids)))
                for row, r in zip(found, records, strict=True)
            ]
            return torch.stack(parts)

        mask = torch.stack([torch.arange(width) < len(r.response_ids) for r in records])
        sampled = nn.utils.rnn.pad_sequence([torch.tensor(r.rollout_logprobs) for r in records], batch_first=True)
        even = torch.tensor([sum(token % 2 == 0 for token in r.response_ids) / len(r.response_ids) for r in records])
        advantages = (even.view(len(PROMPTS), -1) - even.view(len(PROMPTS), -1).mean(1, keepdim=True)).view(-1, 1)
        with torch.no_grad():
            old = scored()
        logprobs = scored()
        loss = loss_of(model, logprobs, old, sampled, mask, advantages)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rollout.update(model.named_parameters())
    return weights(trainer)


def plain(model: nn.Module, logprobs: Tensor, old: Tensor, sampled: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss without any section."""
    return -((logprobs - old).exp() * advantages)[mask].mean()


def corrected(
    model: nn.Module, logprobs: Tensor, old: Tensor, sampled: Tensor, mask: Tensor, advantages: Tensor
) -> Tensor:
    """Return the loss with truncated importance weights, from their definition."""
    ratio = (old.double() - sampled.double()).exp().clamp(max=2.0).float().masked_fill(~mask, 0.0)
    return -(ratio * (logprobs - old).exp() * advantages)[mask].mean()


@pytest.mark.parametrize(
    "block", [None, {}, {"monitor": {"weight_sync": "off"}}, {"level": "observe", "lr": {"period": 2}}]
)
def test_an_empty_block_changes_no_bit(block: Any, tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run(block, trainer, rollout, tmp_path).start() as run:
        learn(run, 3)
    assert same(by_hand(3, plain), weights(trainer))


def test_the_correction_is_the_one_from_its_definition(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"correction": {"preset": "tis"}}, trainer, rollout, tmp_path).start() as run:
        logs = learn(run, 3)
    found, expected, stock = weights(trainer), by_hand(3, corrected), by_hand(3, plain)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in found)
    assert not all(torch.allclose(found[name], stock[name], atol=1e-4) for name in found)
    assert logs[0]["mismatch/rollout_is_mean"] == pytest.approx(1, abs=0.05)


def test_both_sides_are_what_a_run_asks_for() -> None:
    trainer, rollout = sides()
    assert isinstance(trainer, TrainerSide) and isinstance(trainer, LoopTrainer)
    assert isinstance(rollout, RolloutSide) and isinstance(rollout, LoopRollout)


def test_a_run_measures_and_reports(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"lr": {"period": 2}}, trainer, rollout, tmp_path).start() as run:
        logs = learn(run, 3)
    # The engine's noise is the gap: its mean |Δlogp| is of the size of the noise.
    assert all(0.1 * NOISE < log["mismatch/logp_abs_diff_mean"] < 3 * NOISE for log in logs)
    assert [log["mismatch/lr_multiplier"] for log in logs] == [1, 1, 0.5]
    assert logs[2]["learning_rate"] == pytest.approx(0.05 * (1 - 0.8 * 2 / 10) * 0.5)
    assert all({"reward", "length", "loss", "grad_norm", "mismatch/weight_sync_gap"} <= set(log) for log in logs)
    written = read_run(tmp_path / "mismatch")
    assert [record.step for record in written.steps] == [1, 2, 3] and [end.status for end in written.ends] == [
        "completed"
    ]
    assert written.header["run"]["host"] == "a loop of one's own" and written.header["engine"]["engine"] == "torch"


def test_a_failed_loop_says_so_in_its_file(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.raises(ZeroDivisionError), Run(None, trainer, rollout, tmp_path).start() as run:
        learn(run, 1)
        1 / 0  # noqa: B018
    (end,) = read_run(tmp_path / "mismatch").ends
    assert end.status == "failed" and "ZeroDivisionError" in end.message
    # Nothing of the run is left on the optimizer.
    assert trainer.scheduler.get_last_lr() == [pytest.approx(0.05 * 0.92)]


KL = {"kl": {"coef": 0.1}}


def leaving_out(verb: str) -> Callable[[Run], None]:
    """Return a loop of one step that uses everything but a verb."""

    def loop(run: Run) -> None:
        batch = run.batch(run.rollout.generate(PROMPTS))
        with torch.no_grad():
            old, ref = run.score(batch), run.reference(batch)
        if verb != "measure":
            run.measure(batch, old, ref)
        if verb != "correct":
            run.correct(batch, old)
        logprobs = run.score(batch)
        term = run.kl(batch, logprobs, ref) if verb != "kl" else torch.zeros_like(old)
        loss = -(logprobs * rewards_of(batch)).mean() + (0.0 if verb == "kl in loss" else term.mean())
        run.step(loss)

    return loop


@pytest.mark.parametrize(
    ("verb", "block", "named"),
    [
        ("correct", {"correction": {"preset": "tis"}}, r"step 1: mismatch.correction is on, and run.correct"),
        ("kl", KL, r"step 1: mismatch.kl is on, and no gradient went through"),
        ("kl in loss", KL, r"step 1: mismatch.kl is on, and no gradient went through"),
        ("measure", {}, r"step 1: the gap of each batch is measured by run.measure"),
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


@pytest.mark.parametrize("verb", ["correct", "kl", "kl in loss"])
def test_a_verb_without_its_section_may_be_left_out(verb: str, tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({}, trainer, rollout, tmp_path).start() as run:
        leaving_out(verb)(run)
    assert run.steps == 1


def test_rollouts_before_the_weights_are_sent_are_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.raises(LoopError, match=r"step 1: the trainer's weights have changed .* call run.send\(\)"):
        with Run(None, trainer, rollout, tmp_path).start() as run:
            learn(run, 2, sends=False)
    assert run.steps == 1


def test_rollouts_of_earlier_weights_are_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run(None, trainer, rollout, tmp_path).start() as run:
        early = rollout.generate(PROMPTS)
        learn(run, 1)
        with pytest.raises(ProvenanceError, match="weight version 0, but the engine is at 1"):
            run.batch(early)


def test_an_engine_that_drops_an_update_is_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    rollout.drops_updates = True
    with pytest.raises(WeightSyncError, match="stale"), Run(None, trainer, rollout, tmp_path).start() as run:
        learn(run, 1)
    assert [event.name for event in read_run(tmp_path / "mismatch").events if event.level == "error"] == ["weight_sync"]


def test_a_step_past_the_run_is_refused_when_the_weights_are_sent(tmp_path: Path) -> None:
    trainer, rollout = sides()
    block = {"correction": {"preset": "tis"}}
    with (
        pytest.raises(LoopError, match=r"and not by run.step\(\)"),
        Run(block, trainer, rollout, tmp_path).start() as run,
    ):
        batch = run.batch(rollout.generate(PROMPTS))
        (-run.score(batch).mean()).backward()
        trainer.optimizer.step()
        run.send()


def test_an_unstarted_run_is_named(tmp_path: Path) -> None:
    trainer, rollout = sides()
    run = Run(None, trainer, rollout, tmp_path)
    with pytest.raises(LoopError, match="has not been started"):
        run.batch(rollout.generate(PROMPTS))


@pytest.mark.parametrize(
    ("block", "error", "named"),
    [
        ({"kl": {}}, ConfigError, "mismatch.kl.coef is not given"),
        ({"kl": {"preset": "trl"}}, ConfigError, "mismatch.kl.preset='trl' leaves the KL term to a host"),
        ({"correction": {"preset": "tiss"}}, ConfigError, "unknown preset 'tiss'"),
        ({"routing": {"mode": "R3"}}, MismatchError, "no module of the model has experts"),
        ({"precision": {"dtype": "float16"}}, PrecisionAuditError, "engine dtype: expected float16, found float32"),
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


EVERYTHING: dict[str, Any] = {
    "correction": {"preset": "slime_mis"},
    "kl": {"coef": 0.05, "controller": {"target_kl": 0.01}},
    "lr": {
        "rule": "reactive",
        "cooldown": 1,
        "surge": {"baseline_window": 2, "smoothing": 1, "ratio": 1.001, "noise_margin": 0},
    },
    "monitor": {"profile_every": 2},
}


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run(EVERYTHING, trainer, rollout, tmp_path / "whole").start() as run:
        whole = learn(run, 4)
    expected = weights(trainer)

    trainer, rollout = sides()
    kept = tmp_path / "kept"
    with Run(EVERYTHING, trainer, rollout, tmp_path / "cut").start() as run:
        learn(run, 2, checkpoint=kept)
        sampler = rollout._random.get_state()

    trainer, rollout = sides()  # another process begins with the first weights, on both sides
    rollout._random.set_state(sampler)
    saved = torch.load(kept / "trainer.pt")
    for name in saved:
        getattr(trainer, name).load_state_dict(saved[name])
    with Run(EVERYTHING, trainer, rollout, tmp_path / "cut").start(resume=kept) as run:
        assert run.steps == 2
        rest = learn(run, 2)
    assert same(expected, weights(trainer))
    for log, other in zip(whole[2:], rest, strict=True):
        assert {k: v for k, v in log.items() if k != "mismatch/weight_sync_gap"} == {
            k: v for k, v in other.items() if k != "mismatch/weight_sync_gap"
        }
    # The multiplier, the coefficient and the baseline of the weight check had moved by then.
    assert whole[1]["mismatch/kl_coef"] != 0.05
    written = read_run(tmp_path / "cut/mismatch")
    assert [record.step for record in written.steps] == [1, 2, 3, 4] and "resumed" in {e.name for e in written.events}


def test_a_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.raises(RecordError, match=r"mismatch.json holds no state of a run"):
        Run(None, trainer, rollout, tmp_path).start(resume=tmp_path)


def test_an_alarm_stops_the_loop(tmp_path: Path) -> None:
    trainer, rollout = sides()
    block = {"monitor": {"alarms": {"k3_kl": {"above": 0.0, "patience": 2, "action": "stop"}}}}
    with pytest.warns(UserWarning, match="k3_kl"), Run(block, trainer, rollout, tmp_path).start() as run:
        stops = []
        while not stops or stops[-1] is None:
            learn(run, 1)
            stops.append(run._log.stopped)
    assert len(stops) == 2 and stops[0] is None and "k3_kl" in str(stops[1])


def test_a_micro_batch_has_its_own_rows(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run(None, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        with torch.no_grad():
            whole = run.score(batch)
            halves = [run.score(batch.rows(first, first + 8)) for first in (0, 8)]
        assert torch.allclose(torch.cat(halves), whole, atol=1e-6)
        assert len(batch.rows(0, 8).records) == 8


def test_weights_of_the_correction_are_the_primitives(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"correction": {"preset": "icepop"}}, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        with torch.no_grad():
            old = run.score(batch)
        found = run.correct(batch, old)
        expected = correct(batch.rollout_logprobs, old, batch.response_mask, run.block.correction)  # type: ignore[arg-type]
        assert torch.equal(found.weights, expected.weights) and torch.equal(found.mask, expected.mask)


def test_sides_are_copied_never_shared() -> None:
    trainer, rollout = sides()
    copied = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    assert same(dict(copied.named_parameters()), dict(rollout.model.named_parameters()))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny mixture-of-experts checkpoint in float32."""
    return tiny_model("moe", tmp_path_factory.mktemp("models") / "moe")


class OwnNames(TrainedModel):
    """A trainer whose engine has the model's own names, experts of a layer in one tensor."""

    def checkpoint_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self.named_parameters()


def moe_sides(path: Path, *, dtype: str = "float32", rate: float = 1e-3) -> tuple[TrainedModel, TorchRollout]:
    """Return a mixture of experts with optimizer and reference, and an engine with the same weights in a dtype."""
    model, reference, sampler = (
        AutoModelForCausalLM.from_pretrained(path, dtype=kind) for kind in (torch.float32, torch.float32, dtype)
    )
    trainer = OwnNames(model, torch.optim.AdamW(model.parameters(), lr=rate), reference=reference)
    return trainer, TorchRollout(sampler, dtype=dtype)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_routes_are_replayed(mode: str, moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe, dtype="bfloat16")
    block = {"routing": {"mode": mode, "agreement_rate": 1.0, "reference": True}, "kl": {"coef": 0.1}}
    with Run(block, trainer, rollout, tmp_path).start() as run:
        logs = learn(run, 2)
        assert run._replay is not None and run._replay.forwards == (6 if mode == "R3" else 4)
        batch = run.batch(rollout.generate(PROMPTS))
        with torch.no_grad():
            old, native = run.score(batch), trainer.logprobs(batch)
        replayed = run.score(batch)
    assert torch.equal(old, replayed.detach())
    # Under R2 they are the model's own, under R3 those of an engine in another dtype, of which some differ.
    assert torch.equal(old, native) == (mode == "R2")
    assert all("mismatch/routing/set_mismatch_frac" in log for log in logs)
    # They come and go with each pass, and are in the header all the same.
    patched = {patch["name"] for patch in read_run(tmp_path / "mismatch").header["patches"]}
    assert patched == {"torch/non_reentrant_checkpoint", "torch/reentrant_checkpoint"}


def test_a_pass_that_is_not_replayed_is_named_before_the_first_step(moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe)
    with pytest.raises(LoopError, match=r"step 1: mismatch.routing.mode='R3', and no forward pass of this step"):
        with Run({"routing": {"mode": "R3"}}, trainer, rollout, tmp_path).start() as run:
            batch = run.batch(rollout.generate(PROMPTS))
            with torch.no_grad():
                run.measure(batch, run.score(batch))
            run.step(-(trainer.logprobs(batch) * rewards_of(batch)).mean())


def test_a_pass_of_ones_own_is_replayed(moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe)
    with Run({"routing": {"mode": "R3"}}, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        with torch.no_grad():
            run.measure(batch, run.score(batch))
        with run.replaying(batch):
            logits = trainer.model(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits
        run.step(logits.square().mean())
        with pytest.raises(RoutingError, match="nothing was replayed"), run.replaying(batch):
            trainer.model(input_ids=batch.tokens[:, :3])


def test_rollouts_without_routes_are_refused(moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe)
    early = rollout.generate(PROMPTS)
    with Run({"routing": {"mode": "R3"}}, trainer, rollout, tmp_path).start() as run:
        with pytest.raises(RoutingError, match="these rollouts have no routes"):
            run.batch(early)


def test_float16_is_set_on_the_trainer_and_scaled(moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe, dtype="float16")
    block = {"precision": {"dtype": "float16", "loss_scale": {"init_scale": 2.0**30}}}
    with Run(block, trainer, rollout, tmp_path).start() as run:
        schedule = torch.optim.lr_scheduler.LinearLR(trainer.optimizer, 1.0, 0.1, 10)
        trainer.scheduler = schedule
        logs = learn(run, 3)
        taken = 3 - int(logs[-1]["mismatch/overflow_steps"])
        # A scale far too large: the first steps overflow, are not taken, and do not move the schedule.
        assert taken < 3 and schedule.last_epoch == taken
        assert logs[-1]["mismatch/loss_scale"] == 2.0**30 * 0.5 ** (3 - taken)
    reading = read_run(tmp_path / "mismatch").header["trainer"]
    assert reading["autocast_dtype"] == "float16" and reading["scaler"]["enabled"]


def test_ids_that_cannot_be_decoded_are_asked_of_a_model_that_is_not_of_transformers() -> None:
    vocabulary = {str(token): token for token in range(8)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="0")))
    trainer, _ = sides()
    trainer.tokenizer = tokenizer
    surplus = trainer.surplus()
    assert surplus is not None and (surplus.model_size, surplus.tokenizer_size) == (VOCABULARY, 8)
    assert 0 < surplus.mass_mean < 1


class Two:
    """Ranks of two, of which the other has said this of what it was asked for last."""

    size = 2

    def __init__(self, rank: int = 0, *, sums: float = 0.0, said: Any = None) -> None:
        self.rank, self.sums, self.said = rank, sums, said
        self.asked: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.asked.append(value)
        # Of metrics a rank says a mapping; what is of the same kind is merged.
        return [value, type(value)(self.said) if isinstance(self.said, type(value)) else value]

    def sum(self, values: Tensor) -> Tensor:
        self.asked.append(values)
        return values + torch.full_like(values, self.sums)


@pytest.mark.parametrize("trigger", ["mismatch_kl", "f_tau"])
def test_all_ranks_lead_the_rate_by_the_gap_of_all(trigger: str, tmp_path: Path) -> None:
    collected = []
    for noise in (NOISE, 10 * NOISE):
        trainer, rollout = sides(noise=noise)
        ranks = Two()
        with Run({"lr": {"trigger": trigger}}, trainer, rollout, tmp_path / str(noise), ranks=ranks).start() as run:
            batch = run.batch(rollout.generate(PROMPTS))
            ranks.asked.clear()
            ranks.sums = 8.0
            with torch.no_grad():
                run.measure(batch, run.score(batch))
            (mine,) = (values for values in ranks.asked if isinstance(values, Tensor))
            assert mine[2] == batch.response_mask.sum()
            (entry,) = run._rate._collected  # type: ignore[union-attr]
            collected.append(entry)
            kl, f_tau, tokens = (mine + 8.0).tolist()
            assert entry == (tokens, {"mismatch_kl": kl / tokens, "f_tau": f_tau / tokens})
    assert collected[0] != collected[1]


def test_loss_and_gap_of_the_weights_are_means_over_ranks(tmp_path: Path) -> None:
    trainer, rollout = sides()
    ranks = Two(said={"loss": 9.0, "mismatch/weight_sync_gap": 3.0})
    with Run({}, trainer, rollout, tmp_path, ranks=ranks).start() as run:
        (log,) = learn(run, 1)
    own = next(asked for asked in ranks.asked if isinstance(asked, dict) and "loss" in asked)
    assert log["loss"] == (own["loss"] + 9) / 2
    assert log["mismatch/weight_sync_gap"] == (own["mismatch/weight_sync_gap"] + 3) / 2


def test_passes_for_logits_are_replayed(moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe, dtype="bfloat16")
    block = {"routing": {"mode": "R3", "agreement_rate": 0.0}, "kl": {"coef": 0.1, "estimator": "full"}}
    with Run(block, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        seen = []
        logits = trainer.logits
        trainer.logits = lambda *given, **more: seen.append(logits(*given, **more)) or seen[-1]  # type: ignore[method-assign]
        with torch.no_grad():
            old, ref = run.score(batch), run.reference(batch)
        run.kl(batch, run.score(batch), ref)
        ids = [[*record.response_ids] for record in batch.records]
        policy = seen[0].log_softmax(-1)
        for row, tokens in enumerate(ids):
            own = policy[row, range(len(tokens)), tokens]
            # The engine computes in another dtype, so that some of its routes are not the model's own.
            assert torch.allclose(own, old[row, : len(tokens)], atol=1e-5)
        assert not torch.allclose(old, trainer.logprobs(batch), atol=1e-5)


def test_gradients_that_are_not_finite_raise_their_alarm(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.warns(UserWarning, match="grad_norm"), Run({}, trainer, rollout, tmp_path).start() as run:
        for _ in range(3):
            batch = run.batch(rollout.generate(PROMPTS))
            with torch.no_grad():
                run.measure(batch, run.score(batch))
            kept = weights(trainer)
            run.backward(run.score(batch).mean())
            next(trainer.model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
            run.step()
            for name, tensor in trainer.named_parameters():
                tensor.data.copy_(kept[name])
            trainer.optimizer.state.clear()
            run.send()
            assert str(run.log().metrics["grad_norm"]) == "nan"
    assert "grad_norm" in [(event.data or {}).get("metric") for event in read_run(tmp_path / "mismatch").events]


def test_a_bad_update_is_warned_of_where_it_is_no_error(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"monitor": {"weight_sync": "warn"}}, trainer, rollout, tmp_path).start() as run:
        rollout.drops_updates = True
        with pytest.warns(UserWarning, match="stale"):
            learn(run, 1)


def test_a_running_loop_goes_back_to_a_state(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run(EVERYTHING, trainer, rollout, tmp_path).start() as run:
        learn(run, 1)
        state, kept = run.state_dict(), copy.deepcopy(trainer.model.state_dict())
        learn(run, 1)
        trainer.model.load_state_dict(kept)
        run.load_state_dict(state)
        verdict = run.send()
        assert run.steps == 1 and verdict is not None and verdict.ok
        learn(run, 1)
        batch = run.batch(rollout.generate(PROMPTS))
        run.backward(run.score(batch).mean())
        run.load_state_dict(state)
        assert "loss" not in run.log().metrics and not run._parts  # nothing of the steps that are undone


def test_a_run_that_has_ended_is_saved_with_its_rate(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"lr": {"period": 2}}, trainer, rollout, tmp_path).start() as run:
        learn(run, 2)
        before = run.state_dict()["lr"]
    run.save(tmp_path)
    assert run.state_dict()["lr"] == before and before["control"]["step"] == 2


def test_a_rate_that_is_controlled_from_a_resume_on_joins_at_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, rollout = sides()
    with Run({}, trainer, rollout, tmp_path).start() as run:
        learn(run, 5)
        save(run, tmp_path)
    with Run({"lr": {"period": 4}}, trainer, rollout, tmp_path).start(resume=tmp_path) as run:
        (log,) = learn(run, 1)
    assert log["mismatch/lr_multiplier"] == 0.5
    assert "checkpoint of step 5 holds no state of mismatch.lr" in caplog.text


def test_observe_stops_at_nothing(tmp_path: Path) -> None:
    trainer, rollout = sides()
    block = {"level": "observe", "lr": {"trigger": "mismatch_kl"}}
    with pytest.warns(UserWarning, match="observe"), Run(block, trainer, rollout, tmp_path).start() as run:
        early = rollout.generate(PROMPTS[:2])
        rollout.weight_version += 1
        batch = run.batch(early + rollout.generate(PROMPTS[2:]))
        assert len(batch) == 16
        old = run.score(batch).detach()
        old[0, 0] = float("nan")
        run.measure(batch, old)
        run.step(run.score(batch).mean())
        trainer.optimizer.zero_grad()
        run._rate.collect(1.0, f_tau=1.0)  # type: ignore[union-attr]  # no statistic of this trigger
        run.step(run.score(batch).mean())
    found = {event.name for event in read_run(tmp_path / "mismatch").events}
    assert "observed" in found and {"records", "measure", "lr"} <= set(run._verdicts.counts)


def test_an_error_in_flight_is_the_one_that_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rollout = sides()
    block = {"lr": {"period": 2}}

    def full(*given: Any, **more: Any) -> None:
        raise OSError("no space left")

    with pytest.raises(ZeroDivisionError) as raised, Run(block, trainer, rollout, tmp_path).start() as run:
        monkeypatch.setattr(run._log, "end", full)
        1 / 0  # noqa: B018
    assert "OSError: no space left" in raised.value.__notes__[0]
    Run(block, trainer, rollout, tmp_path / "again").start().end()  # nothing was left on the optimizer


def test_a_start_that_fails_leaves_nothing_on_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rollout = sides()
    block = {"lr": {"period": 2}}

    def down(tokens: Tensor) -> Tensor:
        raise RuntimeError("the engine is down")

    again = Run(block, trainer, rollout, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="is down"):
        patch.setattr(rollout, "score", down)
        again.start()
    Run(block, trainer, rollout, tmp_path / "other").start().end()
    with again.start() as run:
        learn(run, 1)
        save(run, tmp_path)
        assert run.state_dict()["lr"]["control"]["step"] == 1
    rollout.drops_updates = True
    with torch.no_grad():
        trainer.model.embed.weight.add_(1.0)
    with pytest.raises(WeightSyncError):
        Run(block, trainer, rollout, tmp_path).start(resume=tmp_path)
    end = read_run(tmp_path / "mismatch").ends[-1]
    assert end.status == "failed" and end.message.startswith("WeightSyncError")
    Run(block, trainer, rollout, tmp_path / "again").start().end()


def test_lengths_are_summed_where_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rollout = sides()
    block = {"lr": {}, "monitor": {"weight_sync": "off"}}
    with Run(block, trainer, rollout, tmp_path, ranks=Two()).start() as run:
        records = rollout.generate(PROMPTS)

        def moved(tensor: Tensor) -> Tensor:
            raise AssertionError("moved to where the ranks' backend may not be")

        monkeypatch.setattr(Tensor, "cpu", moved)
        run.batch(records)


def test_what_one_batch_does_not_know_does_not_lead(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"lr": {}}, trainer, rollout, tmp_path).start() as run:
        for reason in ("stop", None):
            records = [dataclasses.replace(record, finish_reason=reason) for record in rollout.generate(PROMPTS)]
            batch = run.batch(records)
            with torch.no_grad():
                run.measure(batch, run.score(batch))
            run.backward(run.score(batch).mean() / 2)
        run.step()
        (entry,) = run._rate.control.state.surge.history  # type: ignore[union-attr]
        assert entry.truncated is None


def test_every_rank_looks_for_ids_that_cannot_be_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rollout = sides()
    asked = []
    monkeypatch.setattr(trainer, "surplus", lambda: asked.append(1))
    Run({}, trainer, rollout, tmp_path, ranks=Two(1)).start().end()
    assert asked == [1]


def test_the_parts_of_a_loss_are_added(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({}, trainer, rollout, tmp_path).start() as run:
        for parts in (1, 4):
            batch = run.batch(rollout.generate(PROMPTS))
            with torch.no_grad():
                run.measure(batch, run.score(batch))
            losses = [run.score(batch).mean() / parts for _ in range(parts)]
            for loss in losses:
                run.backward(loss)
            run.step()
            run.send()
            assert run.log().metrics["loss"] == pytest.approx(losses[0].item() * parts)


def test_each_batch_of_a_step_is_measured_and_corrected(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"correction": {"preset": "tis"}}, trainer, rollout, tmp_path).start() as run:
        first, second = (run.batch(rollout.generate(PROMPTS)) for _ in range(2))
        for batch in (second, first):
            with torch.no_grad():
                old = run.score(batch)
            run.measure(batch, old)
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


def test_the_kl_controller_moves_once_for_each_batch(tmp_path: Path) -> None:
    block = {"kl": {"coef": 0.1, "controller": {"target_kl": 1e-3}}}
    states = []
    for parts in ([(0, 16)], [(0, 5), (5, 16)]):
        trainer, rollout = sides()
        trainer.reference = Recurrent(3)
        with Run(block, trainer, rollout, tmp_path / str(len(parts))).start() as run:
            batch = run.batch(rollout.generate(PROMPTS))
            for part in (batch.rows(*rows) for rows in parts):
                with torch.no_grad():
                    run.measure(part, run.score(part), run.reference(part))
                assert run._kl is not None and run._kl.coef == 0.1
            states.append(run.state_dict()["kl"])
            run.batch(rollout.generate(PROMPTS))
            assert run._kl.coef == states[-1]["coef"] != 0.1 and run.state_dict()["kl"] == states[-1]
    assert states[0]["steps"] == states[1]["steps"] == 1
    assert states[0]["coef"] == pytest.approx(states[1]["coef"])


def test_findings_of_other_ranks_are_written(tmp_path: Path) -> None:
    trainer, rollout = sides()
    theirs = Finding(check="measure", step=0, kind="stop", message="of another rank")
    ranks = Two()
    with Run({"level": "observe"}, trainer, rollout, tmp_path, ranks=ranks).start() as run:
        ranks.said = [theirs]
        findings_of_ranks(run._verdicts, ranks)
        ranks.said = None
    assert "of another rank" in [e.message for e in read_run(tmp_path / "mismatch").events if e.name == "observed"][0]

    trainer, rollout = sides()
    ranks = Two(1)
    with Run({"level": "observe"}, trainer, rollout, tmp_path / "one", ranks=ranks).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        old = run.score(batch).detach()
        old[0, 0] = float("nan")
        with pytest.warns(UserWarning, match="NonFiniteLogprobError"):
            run.measure(batch, old)
        run.log()
        assert not run._verdicts.kept
        assert [
            asked[0].check for asked in ranks.asked if isinstance(asked, list) and asked and hasattr(asked[0], "check")
        ]


def test_weights_of_another_step_do_not_reach_the_engine(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"correction": {"preset": "tis"}}, trainer, rollout, tmp_path).start() as run:
        with torch.no_grad():
            trainer.model.embed.weight.add_(1.0)
        with pytest.raises(LoopError, match=r"and not by run.step\(\)"):
            run.send()
        assert rollout.weight_version == 0


def test_the_correction_of_an_evaluation_is_not_logged_as_training(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"correction": {"preset": "tis"}}, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS), split="eval/x")
        with torch.no_grad():
            run.correct(batch, run.score(batch))
        assert "mismatch/rollout_is_mean" not in run.log().metrics
