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

import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin
from mismatch_ext.adapters.trl.rows import row_keys
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from mismatch_ext import files
from mismatch_ext.errors import MismatchError
from mismatch_ext.log_reading import METRICS_FILES, read_run
from tests.peers.trl.scenarios_bad_rows import ENGINE_FAULTS, built, spoiling, weigh_nothing
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

Keys = set[tuple[tuple[int, ...], tuple[int, ...]]]

ROW = 5
"""The bad row of each batch."""
REASONS = ("", "rollout_logprobs", "mask", "old_logprobs", "tokens", "weight_version")
"""What is wrong with a row of each batch, in their order; nothing with the first."""


def in_engine(reason: str) -> Callable[[Any], None] | None:
    """Return what spoils the engine's output of a row for a reason; None if something else does."""
    faults = {"rollout_logprobs": "nan", "mask": "support"}
    return ENGINE_FAULTS[faults[reason]] if reason in faults else None


@contextlib.contextmanager
def each_reason(trainer: Any, faulty: bool) -> Iterator[dict[str, Any]]:
    """Let one row of each batch be bad for another reason; note its tokens whether or not it is."""
    llm, run = trainer.vllm_generation.llm, trainer.mm
    sample, generate, score = llm.generate, trainer._generate, trainer._get_per_token_logps_and_entropies
    noted: dict[str, Any] = {"batch": 0, "keys": set()}

    def reason() -> str:
        return REASONS[noted["batch"] - 1] if faulty else ""

    def sampled(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = sample(prompts, *args, **kwargs)
        if "sampling_params" in kwargs:  # otherwise they are probes of a weight update
            noted["batch"] += 1
            output, completion = [(output, one) for output in outputs for one in output.outputs][ROW]
            if REASONS[noted["batch"] - 1]:
                noted["keys"].add((tuple(output.prompt_token_ids), tuple(completion.token_ids)))
            spoil = in_engine(reason())
            if spoil is not None:
                spoil(completion)
        return outputs

    def generated(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        if reason() == "weight_version":
            records = run.rollouts.records
            known = records[ROW].provenance
            stale = replace(known, weight_version=known.weight_version - 1)
            records[ROW] = replace(records[ROW], provenance=stale)
        if reason() == "tokens":
            completion = output[1][ROW]
            completion[-1] = next(token for token in completion if token != completion[-1])
        return output

    def scored(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        logps, *rest = score(model, input_ids, *args, **kwargs)
        if reason() == "old_logprobs" and run.rollouts is not None:
            logps = logps.clone()
            logps[ROW, 0] = torch.nan
        return (logps, *rest)

    llm.generate = sampled
    trainer._generate, trainer._get_per_token_logps_and_entropies = generated, scored
    try:
        yield noted
    finally:
        llm.generate = sample


def reasons(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train with another reason at each step, and without any and with loss weight 0 for the same rows."""
    found: dict[str, Any] = {}
    for faulty in (False, True):
        trainer = built(model, f"{out}/{faulty}", block, max_steps=len(REASONS), **overrides)
        digests = list[str]()
        trainer.add_callback(Digests(digests))
        with each_reason(trainer, faulty) as noted:
            if not faulty:
                weigh_nothing(trainer, noted)
            trainer.train()
        run = read_run(trainer.mm.log.run_dir)
        found["faulty" if faulty else "weightless"] = {
            "parameters": digests,
            "logged": [entry for entry in trainer.state.log_history if "loss" in entry],
            "said": [event.data for event in run.events if event.name == "bad_rows"],
        }
    return found


class Digests(TrainerCallback):
    """Keeps a digest of the weights after each step."""

    def __init__(self, digests: list[str]) -> None:
        self._digests = digests

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keep one."""
        self._digests.append(digest_of(model))


def not_finite(
    model: str, out: str, block: Any, spoiled: int = 2, in_loss: bool = True, **overrides: Any
) -> dict[str, Any]:
    """Train while the trainer's passes over one batch are finite in no row; return how it ended, and each step's weights.

    With `in_loss` the model itself is spoiled, and so are the gradients; otherwise only what the first pass returns.
    """
    trainer = built(model, out, block, **{"max_steps": 4, **overrides})
    score = trainer._get_per_token_logps_and_entropies
    norm = trainer.model.model.norm
    count = {"batches": 0}

    def scored(*args: Any, **kwargs: Any) -> Any:
        fresh = trainer.mm.rollouts is not None
        count["batches"] += fresh
        if count["batches"] != spoiled or not (fresh or in_loss):
            return score(*args, **kwargs)
        handle = norm.register_forward_hook(lambda module, given, result: result * torch.nan)
        try:
            return score(*args, **kwargs)
        finally:
            handle.remove()

    trainer._get_per_token_logps_and_entropies = scored
    digests = [digest_of(trainer.model)]
    trainer.add_callback(Digests(digests))
    error = ""
    try:
        trainer.train()
    except MismatchError as raised:
        error = f"{type(raised).__name__}: {raised}"
    scaler, run_dir = trainer.accelerator.scaler, trainer.mm.log.run_dir
    return {
        "error": error,
        "steps": trainer.state.global_step,
        "parameters": digests,
        "skipped": None if scaler is None else scaler.metrics()["overflow_steps"],
        "scale": None if scaler is None else scaler.get_scale(),
        "said": [event.message for event in read_run(run_dir).events if event.name == "bad_rows"],
        "kept": sorted(path.name for path in run_dir.glob("evidence-*")),
        "checkpoints": sorted(path.name for path in run_dir.parent.glob("checkpoint-*")),
    }


def not_finite_in_loss(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train while a weight is NaN for the loss of the second step; return how it ended, and each step's weights."""
    trainer = built(model, out, block, max_steps=3, **overrides)
    plain, weight = trainer.compute_loss, trainer.model.model.norm.weight

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step != 1:
            return plain(*args, **kwargs)
        handle = trainer.model.model.norm.register_forward_hook(lambda module, given, result: result * torch.nan)
        try:
            return plain(*args, **kwargs)
        finally:
            handle.remove()

    assert weight.isfinite().all()
    trainer.compute_loss = compute_loss
    digests = list[str]()
    trainer.add_callback(Digests(digests))
    trainer.train()
    return {"parameters": digests, "skipped": trainer.accelerator.scaler.metrics()["overflow_steps"]}


def never_finite(model: str, out: str, block: Any) -> dict[str, Any]:
    """Train while no batch's loss has finite gradients, with a torch scaler, which never gives up; return how it ended."""
    trainer = built(model, out, block, max_steps=30)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.model.model.norm.register_full_backward_hook(lambda module, slopes, given: (slopes[0] * torch.nan,))
    before, error = digest_of(trainer.model), ""
    try:
        trainer.train()
    except MismatchError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "steps": trainer.state.global_step, "moved": digest_of(trainer.model) != before}


def carried_over(model: str, out: str, block: Any, again: int, **overrides: Any) -> dict[str, Any]:
    """Train twice on the first batch, which has a bad row, the second time in place of a later one, as a replay buffer does."""

    class Buffer(MismatchGRPOTrainer):
        pass

    class Replaying:
        """Gives the first batch once more instead of a later one."""

        batches = 0
        first: Any = None

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            output = super()._generate_and_score_completions(*args, **kwargs)  # type: ignore[misc]
            self.batches += 1
            if self.batches == 1:
                self.first = output
            return dict(self.first) if self.batches == again else output

    class WithBuffer(Replaying, Buffer):  # type: ignore[misc]
        pass

    found = {}
    for fault in (None, "nan"):
        args = MismatchGRPOConfig(
            **arguments(f"{out}/{fault}", mismatch=block, bf16=False, beta=0.1, max_steps=again + 1, **overrides)
        )
        trainer: Any = WithBuffer(model=model, reward_funcs=graded, args=args, train_dataset=rows())
        digests = list[str]()
        trainer.add_callback(Digests(digests))
        with spoiling(trainer, fault, [ROW], [1]) as noted:
            if fault is None:
                weigh_nothing(trainer, noted)
            trainer.train()
        found[str(fault)] = {
            "parameters": digests,
            "kl": [entry["mismatch/kl_ref_k3"] for entry in trainer.state.log_history if "mismatch/kl_ref_k3" in entry],
        }
    return found


def oversampled(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train with a class that generates twice for each batch and drops the first; in the second batch one row's tokens change."""

    class Choosing(GRPOTrainer):
        drawn = 0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self._generate([row["prompt"] for row in inputs])
            return super()._generate_and_score_completions(inputs)

        def _generate(self, prompts: Any) -> Any:
            output = super()._generate(prompts)
            self.drawn += 1
            if self.drawn == 4:
                completion = output[1][ROW]
                completion[0] = next(token for token in completion if token != completion[0])
            return output

    class Mine(MismatchTrainerMixin, Choosing):
        pass

    args = MismatchGRPOConfig(**arguments(out, mismatch=block, bf16=False, **overrides))
    trainer: Any = Mine(model=model, reward_funcs=graded, args=args, train_dataset=rows(16))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "bad": [entry.get("mismatch/bad_rows/tokens") for entry in logged],
        "other passes": [entry["mismatch/routing/other_passes"] for entry in logged],
    }


def handled(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train with a class that scores its rows once more, outside of our loss; row 5 of batch 2 is bad.

    Returns how many rows each of these passes had as constants.
    """
    constants: list[int] = []

    class Scoring(MismatchGRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            names = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
            tokens, mask = (torch.cat([inputs[name] for name in of_both], dim=1) for of_both in names)
            logps, *_ = self._get_per_token_logps_and_entropies(model, tokens, mask, inputs["completion_ids"].size(1))
            constants.append(int((logps == 0).all(1).sum()))
            return loss + 0.1 * (logps * inputs["completion_mask"]).mean()

    args = MismatchGRPOConfig(**arguments(out, mismatch=block, bf16=False, beta=0.1, max_steps=3, **overrides))
    trainer: Any = Scoring(model=model, reward_funcs=graded, args=args, train_dataset=rows())
    error = ""
    with spoiling(trainer, "nan", [ROW], [2]):
        try:
            trainer.train()
        except MismatchError as raised:
            error = f"{type(raised).__name__}: {raised}"
    finite = all(bool(values.isfinite().all()) for values in trainer.model.parameters())
    return {"constants": constants, "error": error, "finite": finite}


def of_a_user(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Score a known row and one of other tokens in a pass of a user's own, while a batch is scored."""
    trainer = built(model, out, block, max_steps=1, **overrides)
    reward, seen = trainer._calculate_rewards, dict[str, Any]()

    def rewarded(inputs: Any, prompts: Any, completions: Any, ids: Any, *args: Any, **kwargs: Any) -> Tensor:
        batch = trainer.mm.rollouts
        prompt, completion = list(batch.prompts[0]), list(ids[0])
        tokens = torch.tensor([[*prompt, *completion], [*prompt, *reversed(completion)]])
        mask, length = torch.ones_like(tokens), len(completion)
        forwards = trainer.mm.routing.forwards
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies(trainer.model, tokens, mask, length)
        seen["replayed"] = trainer.mm.routing.forwards - forwards
        seen["known"] = len(batch.table.routes.keys() & set(row_keys(tokens, mask, length)))
        return reward(inputs, prompts, completions, ids, *args, **kwargs)

    trainer._calculate_rewards = rewarded
    trainer.train()
    return seen


def lengths(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Let a row of the second batch be bad; return what leads the rate, and the lengths of all completions of each batch."""
    trainer = built(model, out, block, **overrides)
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
    ends = [*trainer.eos_token_ids, trainer._tokenizer.pad_token_id]
    return {"led": led, "sampled": sampled, "ends": ends, "limit": trainer.max_completion_length}


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


def full_disk(model: str, out: str, block: Any) -> dict[str, Any]:
    """Train with a bad row while no file of this package can be written, and resume from a checkpoint of that time."""
    saving = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    trainer = built(model, f"{out}/first", block, **saving)
    trainer.add_callback(Full(trainer, 2, 4))
    digests = list[str]()
    trainer.add_callback(Digests(digests))
    with spoiling(trainer, "nan", [ROW], [3]):
        trainer.train()
    run_dir = trainer.mm.log.run_dir
    run = read_run(run_dir)
    counted = [
        entry.get("mismatch/bad_rows/rollout_logprobs") for entry in trainer.state.log_history if "loss" in entry
    ]
    checkpoint = Path(out, "first", "checkpoint-3")
    resumed = built(model, f"{out}/second", block, **saving)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    return {
        "steps": trainer.state.global_step,
        "end": run.ends[-1].status,
        "written": sorted({record.step for record in run.steps if "loss" in record.metrics}),
        "counted": counted,
        "lost": [event.data for event in run.events if event.name == "lines_lost"],
        "evidence": sorted(path.name for path in run_dir.glob("evidence-*")),
        "states": [Path(out, "first", f"checkpoint-{step}", "mismatch.json").exists() for step in range(1, 6)],
        "saved": json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"],
        "resumed": resumed.state.global_step,
        "resumed status": resumed.mm.verdict.status,
    }
