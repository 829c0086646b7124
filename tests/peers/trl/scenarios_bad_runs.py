"""Whole runs of TRL with bad rows: each reason, batches of nothing else, rows that are trained on later, and a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from torch import Tensor
from transformers import TrainerCallback

from examples.arithmetic.tokenizer import VOCABULARY
from mismatch_ext import files
from mismatch_ext.errors import NonFiniteLogprobError
from mismatch_ext.log_reading import METRICS_FILES, read_run
from tests.peers.trl.scenarios_bad_rows import (
    ACTS,
    ALL,
    ENGINE_FAULTS,
    built,
    checkpoints_of,
    evidence_of,
    expect_finite,
    rows_alone,
    spoiling,
    tokens_of,
    weigh_nothing,
)
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

SCALED = {"precision": {"dtype": "float16", "init_scale": 1024.0}}
ROW = 5
"""The bad row of a batch that has one reason."""
REASONS = ("", "rollout_logprobs", "mask", "old_logprobs", "tokens", "weight_version")
"""What is wrong with a row of each batch, in their order; nothing with the first."""


def alike(token: int) -> list[int]:
    """Return the digits that `graded` counts as it does a token, so that a changed answer keeps its reward."""
    even = [VOCABULARY[digit] for digit in "02468"]
    return even if token in even else [VOCABULARY[digit] for digit in "13579"]


def in_engine(reason: str) -> Callable[[Any], None] | None:
    """Return what spoils the engine's output of a row for a reason; None if something else does."""
    faults = {"rollout_logprobs": "nan", "mask": "support"}
    return ENGINE_FAULTS[faults[reason]] if reason in faults else None


@contextlib.contextmanager
def each_reason(trainer: Any, faulty: bool) -> Iterator[dict[str, Any]]:
    """Let one row of each batch be bad for another reason; note its number, and its tokens whether or not it is."""
    llm, run = trainer.vllm_generation.llm, trainer.mm
    sample, generate, score = llm.generate, trainer._generate, trainer._get_per_token_logps_and_entropies
    noted: dict[str, Any] = {"batch": 0, "keys": set()}

    def reason() -> str:
        return REASONS[noted["batch"] - 1] if faulty else ""

    def sampled(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = sample(prompts, *args, **kwargs)
        if "sampling_params" in kwargs:  # otherwise they are probes of a weight update
            noted["batch"] += 1
            completions = [one for output in outputs for one in output.outputs]
            noted["row"] = rows_alone(outputs)[0]
            completion = completions[noted["row"]]
            if REASONS[noted["batch"] - 1]:
                noted["keys"].add(tokens_of(outputs)[noted["row"]])
            spoil = in_engine(reason())
            if spoil is not None:
                spoil(completion)
        return outputs

    def generated(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        if reason() == "weight_version":
            records = run.rollouts.records
            row = noted["row"]
            known = records[row].provenance
            stale = replace(known, weight_version=known.weight_version - 1)
            records[row] = replace(records[row], provenance=stale)
        if reason() == "tokens":
            completion = output[1][noted["row"]]
            completion[0] = next(token for token in alike(completion[0]) if token != completion[0])
        return output

    def scored(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        logps, *rest = score(model, input_ids, *args, **kwargs)
        if reason() == "old_logprobs" and run.rollouts is not None:
            logps = logps.clone()
            logps[noted["row"], 0] = torch.nan
        return (logps, *rest)

    llm.generate = sampled
    trainer._generate, trainer._get_per_token_logps_and_entropies = generated, scored
    try:
        yield noted
    finally:
        llm.generate = sample


def reasons(model: str, out: str, **overrides: Any) -> None:
    """Train with another reason at each step, and without any and with loss weight 0 for the same rows."""
    found = []
    for faulty in (False, True):
        trainer = built(model, f"{out}/{faulty}", ALL | {"sampling_mask": {}}, max_steps=len(REASONS), **overrides)
        digests = digests_of(trainer)
        with each_reason(trainer, faulty) as noted:
            if not faulty:
                weigh_nothing(trainer, noted)
            trainer.train()
        said = [event.data for event in read_run(trainer.mm.log.run_dir).events if event.name == "bad_rows"]
        assert said == ([{"reason": reason, "rows": 1} for reason in REASONS[1:]] if faulty else [])
        found.append(digests)
    assert found[0] == found[1] and len(set(found[0])) == 6
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    expect_finite(logged)
    for step, reason in enumerate(REASONS[1:], 1):
        counts = [entry.get(f"mismatch/bad_rows/{reason}") for entry in logged]
        assert counts == [None] * step + [1.0] + [0.0] * (5 - step), reason


class Digests(TrainerCallback):
    """Keeps a digest of the weights after each step."""

    def __init__(self, digests: list[str]) -> None:
        self._digests = digests

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep one."""
        self._digests.append(digest_of(model))


def digests_of(trainer: Any) -> list[str]:
    """Return a list that gets a digest of the weights after each step."""
    digests = list[str]()
    trainer.add_callback(Digests(digests))
    return digests


@contextlib.contextmanager
def broken(model: Any) -> Iterator[None]:
    """Let a model compute NaN meanwhile."""
    handle = model.model.norm.register_forward_hook(lambda module, given, result: result * torch.nan)
    try:
        yield
    finally:
        handle.remove()


def break_batch(trainer: Any, number: int) -> None:
    """Let the trainer's passes over one batch be finite in no row."""
    score, count = trainer._get_per_token_logps_and_entropies, [0]

    def scored(*args: Any, **kwargs: Any) -> Any:
        count[0] += trainer.mm.rollouts is not None
        with broken(trainer.model) if count[0] == number else contextlib.nullcontext():
            return score(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = scored


def not_finite(model: str, out: str) -> None:
    """Have a batch that is finite in no row: it moves no weight, and ends an acting run with a checkpoint."""
    trainer = built(model, out, ACTS, max_steps=4)
    break_batch(trainer, 2)
    digests = digests_of(trainer)
    trainer.train()
    first, second = digests
    assert first == second and trainer.state.global_step == 2
    assert checkpoints_of(trainer) == ["checkpoint-2"] and evidence_of(trainer) == ["evidence-2.jsonl.gz"]
    events = [event.message for event in read_run(trainer.mm.log.run_dir).events if event.name == "bad_rows"]
    assert events[0].startswith("8 bad rows (old_logprobs) before step 2, such as: row 0, token 0: the trainer's")
    assert events[1].startswith("8 of the 16 rows of steps 1 to 2 were bad")


def not_finite_in_many_steps(model: str, out: str) -> None:
    """Have such a batch in float16: it lowers no loss scale, however many steps it takes."""
    trainer = built(model, out, ALL | SCALED, num_iterations=22, max_steps=24)
    break_batch(trainer, 1)
    digests = digests_of(trainer)
    trainer.train()
    scaler = trainer.accelerator.scaler
    assert scaler.metrics()["overflow_steps"] == 22 and scaler.get_scale() == 1024.0
    *skipped, first, second = digests
    assert len(set(skipped)) == 1 and len({skipped[-1], first, second}) == 3


def not_finite_in_loss(model: str, out: str, section: dict[str, Any]) -> None:
    """Let the model be broken in the loss of the second step alone: a section finds it, and the scaler skips the step."""
    trainer = built(model, out, ALL | section | SCALED, max_steps=3, top_k=6)
    plain = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        with broken(trainer.model) if trainer.state.global_step == 1 else contextlib.nullcontext():
            return plain(*args, **kwargs)

    trainer.compute_loss = compute_loss
    digests = digests_of(trainer)
    trainer.train()
    first, second, third = digests
    assert trainer.accelerator.scaler.metrics()["overflow_steps"] == 1 and first == second != third


def never_finite(model: str, out: str) -> None:
    """Train while no batch's loss has finite gradients, with a torch scaler, which never gives up: the run ends."""
    trainer = built(model, out, ALL | SCALED, max_steps=30)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.model.model.norm.register_full_backward_hook(lambda module, slopes, given: (slopes[0] * torch.nan,))
    before = digest_of(trainer.model)
    with pytest.raises(NonFiniteLogprobError, match="^the gradients of 20 batches in a row were not finite"):
        trainer.train()
    assert trainer.state.global_step == 19 and digest_of(trainer.model) == before


class Replaying(MismatchGRPOTrainer):
    """Gives the first batch once more instead of a later one, as a replay buffer does."""

    again: int
    batches = 0
    first: Any = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.batches += 1
        if self.batches == 1:
            self.first = output
        return dict(self.first) if self.batches == self.again else output


def carried_over(model: str, out: str, again: int) -> None:
    """Train twice on the first batch, which has a bad row, the second time in place of a later one: the row stays bad."""
    found = []
    for fault in (None, "nan"):
        given = arguments(f"{out}/{fault}", bf16=False, beta=0.1, max_steps=again + 1)
        args = MismatchGRPOConfig(**given, mismatch=ALL | {"kl": {"coef": 0.1}})
        trainer: Any = Replaying(model=model, reward_funcs=graded, args=args, train_dataset=rows())
        trainer.again = again
        digests = digests_of(trainer)
        with spoiling(trainer, fault, [ROW], [1]) as noted:
            if fault is None:
                weigh_nothing(trainer, noted)
            trainer.train()
        found.append(digests)
    assert found[0] == found[1] and len(set(found[0])) == again + 1


def lengths(model: str, out: str) -> None:
    """Let a row of the second batch be bad: the length that leads the rate is that of the others."""
    trainer = built(model, out, ALL | {"lr": {"trigger": "response_length"}})
    led, sampled = list[Any](), list[list[int]]()
    generate = trainer._generate

    def generated(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        sampled.append([len(ids) for ids in output[1]])
        return output

    class Listen(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            rate = trainer.mm.lr.rate
            collect = rate.collect

            def collected(statistics: Any, *weight: Any) -> None:
                led.append(dict(statistics))
                collect(statistics, *weight)

            rate.collect = collected

    trainer._generate = generated
    trainer.add_callback(Listen())
    with spoiling(trainer, "nan", [ROW], [2]):
        trainer.train()
    whole, others, _ = sampled
    bad = others.pop(ROW)
    assert bad != sum(others) / len(others)  # so that it would show
    means = [statistics["response_length"] for statistics in led[:2]]
    assert means == pytest.approx([sum(whole) / len(whole), sum(others) / len(others)])
    assert [statistics["responses"] for statistics in led] == [8, 7, 8]  # by which batches of one step are weighed


class Full(TrainerCallback):
    """Fills the disk after one step, and empties it after another: no file of the run or of its checkpoints can be written."""

    def __init__(self, trainer: Any, first: int, last: int) -> None:
        self._trainer, self._first, self._last = trainer, first, last
        self._patches = contextlib.ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fill or empty it."""
        if state.global_step == self._first:
            write, metrics = os.write, self._trainer.mm.log.run_dir / METRICS_FILES

            def full(fd: int, data: bytes) -> int:
                if Path(os.readlink(f"/proc/self/fd/{fd}")).match(str(metrics)):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(fd, data)

            def full_too(target: Path, data: bytes) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            self._patches.enter_context(mock.patch.object(os, "write", full))
            self._patches.enter_context(mock.patch.object(files, "_replace", full_too))
        if state.global_step == self._last:
            self._patches.close()


def full_disk(model: str, out: str) -> None:
    """Train with a bad row while no file of this package can be written, and resume from a checkpoint of that time."""
    saving = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    trainer = built(model, f"{out}/first", ALL, **saving)
    trainer.add_callback(Full(trainer, 2, 4))
    with spoiling(trainer, "nan", [ROW], [3]):
        trainer.train()
    run = read_run(trainer.mm.log.run_dir)
    assert trainer.state.global_step == 5 and run.ends[-1].status == "completed"
    # The metrics of steps 2 and 3, and that a row of step 3 was bad.
    assert {record.step for record in run.steps if "loss" in record.metrics} == {1, 4, 5}
    assert [event.data for event in run.events if event.name == "lines_lost"] == [{"lines": 3}]
    # It was counted all the same, and no evidence of it could be kept.
    name = "mismatch/bad_rows/rollout_logprobs"
    logged = [entry.get(name) for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [None, None, 1.0, 0.0, 0.0] and evidence_of(trainer) == []
    states = [Path(out, "first", f"checkpoint-{step}", "mismatch.json").exists() for step in range(1, 6)]
    assert states == [True, False, False, True, True]
    checkpoint = Path(out, "first", "checkpoint-3")
    assert json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"] == 3
    resumed = built(model, f"{out}/second", ALL, **saving)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 5 and resumed.mm.verdict.status == "in_sync"
