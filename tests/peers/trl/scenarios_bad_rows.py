"""Runs of TRL in which a row cannot be trained on, and the same runs in which nothing but that row's loss weight is 0."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.trl import (
    MismatchGRPOConfig,
    MismatchGRPOTrainer,
    MismatchRLOOConfig,
    MismatchRLOOTrainer,
    behavior,
)
from mismatch_ext.adapters.trl.bad_rows import as_constants, take_out
from mismatch_ext.adapters.trl.rows import row_keys
from torch import Tensor
from trl import GRPOTrainer

from examples.arithmetic.tokenizer import EOS_ID
from mismatch_ext.log_reading import read_run
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

ACTS: dict[str, Any] = {"monitor": {"weight_sync": "error", "default_alarms": False}}
ALL: dict[str, Any] = {"monitor": {**ACTS["monitor"], "metrics": "all", "max_bad_rows": 1.0}}
BAD = 1
"""The row of TRL's loss by hand that is bad."""
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.1},
    "sequence": {"importance_sampling_level": "sequence"},
    "kl and accumulation": {"beta": 0.1, "current_gradient_accumulation_steps": 2, "args.steps_per_generation": 4},
    "entropy bonus": {"_entropy_bonus_enabled": True, "entropy_coef": 0.1},
    "entropy quantile": {"top_entropy_quantile": 0.5},
}
SPOILED = (
    "advantages",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "ref_per_token_logps",
    "importance_sampling_ratio",
)


def slopes(loss_type: str, case: dict[str, Any], bad: Tensor, taken_out: bool) -> list[Tensor]:
    """Return the slopes of TRL's loss on made-up rows; one row has weight 0, or is bad and taken out, and all logs are finite."""
    inputs = {
        name: values.float().clone() if values.is_floating_point() else values.clone()
        for name, values in {**behavior.INPUTS, **behavior.OF_GRPO}.items()
    }
    logps = behavior.LOGPS.float().requires_grad_()
    entropies = (1.5 + behavior._wave(1.7)).float().requires_grad_()
    scores: tuple[Tensor, Tensor, None] = (logps, entropies, None)
    if taken_out:
        for name in SPOILED:
            inputs[name][BAD] = torch.nan
        take_out(inputs, bad)
        scores = as_constants(scores, bad)  # type: ignore[assignment]
    trainer = behavior.stand_in(GRPOTrainer, {"loss_type": loss_type, **case}, lambda *_, **__: scores)
    loss = GRPOTrainer._compute_loss(trainer, behavior.MODEL, inputs)
    found = torch.autograd.grad(loss, [logps, entropies], allow_unused=True)
    if taken_out:
        logged = [values[-1] for values in trainer._metrics["train"].values()]
        assert all(map(math.isfinite, [loss.item(), *logged])), (loss_type, case)
    return [torch.zeros_like(entropies) if slope is None else slope for slope in found]


def levers() -> None:
    """Take a bad row out of every loss type in every case: it has no slope, and the others keep theirs."""
    bad = torch.tensor([row == BAD for row in range(len(behavior.LOGPS))])
    for loss_type in LOSSES:
        for name, case in CASES.items():
            stock, taken_out = (slopes(loss_type, case, bad, out) for out in (False, True))
            for before, after in zip(stock, taken_out, strict=True):
                assert not after[BAD].any() and torch.equal(after[~bad], before[~bad]), (loss_type, name)
            assert taken_out[0].any()
            # In other cases the made-up row may be clipped or masked by TRL itself.
            assert stock[0][BAD].any() or name not in ("plain", "kl"), loss_type


# Faults of what the engine returns, in the rows of one batch: number of the request -> its completion's output.


def nan_logprob(output: Any) -> None:
    """Report that a sampled token's log-probability is NaN."""
    output.logprobs[-1][output.token_ids[-1]].logprob = float("nan")


def short_routes(output: Any) -> None:
    """Return routes that lack two tokens."""
    output.routed_experts = output.routed_experts[:-2]


def other_support(output: Any) -> None:
    """Report a sampled token as one that truncation has cut off."""
    position = output.logprobs[1]
    if hasattr(output.logprobs, "left"):
        left = output.logprobs.left
        left._pending = [(ids, np.full_like(logprobs, -np.inf)) for ids, logprobs in left._pending]
        return
    position[output.token_ids[1]].logprob = float("-inf")


ENGINE_FAULTS: dict[str, Callable[[Any], None]] = {
    "nan": nan_logprob,
    "short routes": short_routes,
    "support": other_support,
}


def tokens_of(outputs: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return prompt and completion of each row that an engine has answered."""
    return [(tuple(output.prompt_token_ids), tuple(one.token_ids)) for output in outputs for one in output.outputs]


def rows_alone(outputs: Any) -> list[int]:
    """Return the rows of some text whose tokens no other row has.

    Equal rows are bad together, and on some CPUs a random model often ends at once.
    """
    keys = tokens_of(outputs)
    return [row for row, (prompt, text) in enumerate(keys) if keys.count((prompt, text)) == 1 and text[0] > EOS_ID]


@contextlib.contextmanager
def spoiling(
    trainer: Any, fault: str | None, bad_rows: list[int], batches: list[int], *, alone: bool = False
) -> Iterator[dict[str, Any]]:
    """Let the engine's answer have a fault in some rows of some batches; note these rows' tokens whether or not they do.

    Their numbers are those among `rows_alone` if it is so said.
    """
    llm = trainer.vllm_generation.llm
    generate, noted = llm.generate, {"batch": 0, "keys": set()}

    def spoiled(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(prompts, *args, **kwargs)
        if "sampling_params" not in kwargs:
            return outputs  # probes of a weight update
        noted["batch"] += 1
        completions = [one for output in outputs for one in output.outputs]
        numbers = rows_alone(outputs) if alone else range(len(completions))
        if noted["batch"] in batches:
            for row in bad_rows:
                completion = completions[numbers[row]]
                noted["keys"].add(tokens_of(outputs)[numbers[row]])
                if fault is not None:
                    ENGINE_FAULTS[fault](completion)
        return outputs

    llm.generate = spoiled
    try:
        yield noted
    finally:
        llm.generate = generate


def weigh_nothing(trainer: Any, noted: dict[str, Any]) -> None:
    """Let noted rows have no slope in the loss, by a hook on what the scoring pass returns; note the largest one they had."""
    plain = trainer._get_per_token_logps_and_entropies
    noted["slope"] = 0.0

    def without_slope(
        model: Any, input_ids: Tensor, attention_mask: Tensor, length: int, *args: Any, **kwargs: Any
    ) -> Any:
        logps, entropies, auxiliary = plain(model, input_ids, attention_mask, length, *args, **kwargs)
        known = {
            row_keys(
                torch.tensor([[*prompt, *completion]]), torch.ones(1, len(prompt) + len(completion)), len(completion)
            )[0]
            for prompt, completion in noted["keys"]
        }
        kept = torch.tensor([[key not in known] for key in row_keys(input_ids, attention_mask, length)])

        def without(slope: Tensor) -> Tensor:
            noted["slope"] = max(noted["slope"], float((slope * ~kept).abs().max()))
            return slope * kept

        for values in (logps, entropies):
            if values is not None and values.requires_grad:
                values.register_hook(without)
        return logps, entropies, auxiliary

    trainer._get_per_token_logps_and_entropies = without_slope


def built(model: str, out: str, block: Any, rloo: bool = False, **overrides: Any) -> Any:
    """Build a trainer of either kind, in float32."""
    trainer_class, config = (
        (MismatchRLOOTrainer, MismatchRLOOConfig) if rloo else (MismatchGRPOTrainer, MismatchGRPOConfig)
    )
    given = arguments(out, mismatch=block, bf16=False, **overrides)
    if rloo:
        given.pop("vllm_importance_sampling_mode")
    return trainer_class(model=model, reward_funcs=graded, args=config(**given), train_dataset=rows())


@dataclass(frozen=True)
class Trained:
    """A run that has ended."""

    trainer: Any
    parameters: str
    logged: list[dict[str, Any]]
    events: list[Any]
    evidence: list[str]


def trained(
    model: str, out: str, block: Any, fault: str | None, bad_rows: list[int], batches: list[int], **overrides: Any
) -> Trained:
    """Train with a fault in some rows of some batches, or without one and with loss weight 0 for these rows."""
    trainer = built(model, out, block, **overrides)
    with spoiling(trainer, fault, bad_rows, batches) as noted:
        if fault is None:
            weigh_nothing(trainer, noted)
        trainer.train()
    events = [event for event in read_run(trainer.mm.log.run_dir).events if event.name == "bad_rows"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trained(trainer, digest_of(trainer.model), logged, events, evidence_of(trainer))


def evidence_of(trainer: Any) -> list[str]:
    """Return the names of the files of kept rows."""
    return sorted(path.name for path in trainer.mm.log.run_dir.glob("evidence-*"))


def checkpoints_of(trainer: Any) -> list[str]:
    """Return the names of a run's checkpoints."""
    return sorted(path.name for path in trainer.mm.log.run_dir.parent.glob("checkpoint-*"))


def expect_finite(logged: list[dict[str, Any]]) -> None:
    """Check that whatever was logged is a number: what is left of a bad row has a part in TRL's own metrics."""
    for entry in logged:
        assert all(math.isfinite(value) for value in entry.values() if isinstance(value, float)), entry


def missing_logprob(model: str, out: str, **overrides: Any) -> None:
    """Lose a log-probability of one row, in RLOO: the run is the one in which the row has loss weight 0, and counts it."""
    stock, spoiled = (
        trained(model, f"{out}/{fault}", ALL, fault, [5], [2], rloo=True, beta=0.1, **overrides)
        for fault in (None, "nan")
    )
    assert spoiled.parameters == stock.parameters and stock.events == []
    name = "mismatch/bad_rows/rollout_logprobs"
    assert [entry.get(name) for entry in spoiled.logged] == [None, 1, 0.0]
    assert not any("bad_rows" in name for entry in stock.logged for name in entry)
    expect_finite(spoiled.logged)
    (event,) = spoiled.events
    assert event.level == "warning" and event.message.startswith("1 bad rows (rollout_logprobs) before step 2")
    assert spoiled.evidence == ["evidence-2.jsonl.gz"]
    assert spoiled.logged[1]["mismatch/tokens"] < stock.logged[1]["mismatch/tokens"]


def short_routes_of_a_row(model: str, out: str) -> None:
    """Lose routes of one row. The model routes it itself, which changes nothing without an auxiliary loss."""
    block = ALL | {
        "routing": {"mode": "R3", "measured": 1.0},
        "kl": {"coef": 0.05, "baseline": "none"},
        "correction": {"preset": "token_truncate"},
    }
    given = {"num_iterations": 2, "max_steps": 4, "router_aux_loss_coef": 0.0}
    given["model_init_kwargs"] = {"experts_implementation": "eager"}
    stock, spoiled = (
        trained(model, f"{out}/{fault}", block, fault, [3], [2], **given) for fault in (None, "short routes")
    )
    assert spoiled.parameters == stock.parameters and stock.events == []
    assert sum(entry.get("mismatch/bad_rows/routes", 0) for entry in spoiled.logged) == 1
    assert spoiled.evidence == ["evidence-3.jsonl.gz"]


def too_many(model: str, out: str) -> None:
    """Have bad rows in several batches, until the run ends with a checkpoint."""
    found = trained(model, out, ACTS, "nan", [2, 5], [2, 3], max_steps=6)
    assert found.trainer.state.global_step == 3 and checkpoints_of(found.trainer) == ["checkpoint-3"]
    assert [event.level for event in found.events] == ["warning", "warning", "error"]
    assert "4 of the 24 rows of steps 1 to 3 were bad" in found.events[-1].message
    assert found.evidence == ["evidence-2.jsonl.gz", "evidence-3.jsonl.gz"]
