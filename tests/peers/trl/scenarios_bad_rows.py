"""Runs of TRL in which a row cannot be trained on, and the same runs in which nothing but that row's loss weight is 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from mismatch_ext.adapters.trl import (
    MismatchGRPOConfig,
    MismatchGRPOTrainer,
    MismatchRLOOConfig,
    MismatchRLOOTrainer,
    behavior,
)
from mismatch_ext.adapters.trl.bad_rows import as_constants, include_equal_rows, take_out
from mismatch_ext.adapters.trl.rows import RowTable, row_key, row_keys
from torch import Tensor
from trl import GRPOTrainer

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.log_reading import read_run
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

BAD = 1
"""The row of TRL's loss by hand that is bad."""
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"beta": 0.1},
    "bias-corrected kl": {"beta": 0.1, "args.use_bias_correction_kl": True},
    "sequence": {"importance_sampling_level": "sequence"},
    "accumulation": {"current_gradient_accumulation_steps": 2, "args.steps_per_generation": 4},
    "kl and accumulation": {"beta": 0.1, "current_gradient_accumulation_steps": 2, "args.steps_per_generation": 4},
    "entropy bonus": {"_entropy_bonus_enabled": True, "entropy_coef": 0.1},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.02},
    "no engine correction": {"vllm_importance_sampling_correction": False},
}
SPOILED = (
    "advantages",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "ref_per_token_logps",
    "importance_sampling_ratio",
)


def slopes(loss_type: str, case: dict[str, Any], taken_out: bool) -> dict[str, Any]:
    """Return TRL's loss on made-up rows, its slopes, and what it logs; one row has weight 0, or is bad and taken out."""
    bad = torch.tensor([row == BAD for row in range(len(behavior.LOGPS))])
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
    of_logps, of_entropies = torch.autograd.grad(loss, [logps, entropies], allow_unused=True)
    if of_entropies is None:
        of_entropies = torch.zeros_like(entropies)
    own = [of_logps[BAD].abs().max().item(), of_entropies[BAD].abs().max().item()]
    return {
        "loss": loss.item(),
        "others": [of_logps[~bad].tolist(), of_entropies[~bad].tolist()],
        "own": own,
        "logged": {name: values[-1] for name, values in trainer._metrics["train"].items()},
    }


def levers() -> dict[str, Any]:
    """Take a bad row out of every loss type in every case."""
    return {
        f"{loss_type}, {name}": [slopes(loss_type, case, taken_out) for taken_out in (False, True)]
        for loss_type in LOSSES
        for name, case in CASES.items()
    }


def alike() -> dict[str, Any]:
    """Return the bad rows of a batch with equal rows, and what its table says: what an image shows is in no token."""
    keys = [row_key([1], [2, 3]), row_key([1], [2, 3]), row_key([1], [2]), row_key([4], []), row_key([4], [])]
    bad = BadRows(len(keys))
    bad.add(1, "routes", "it lost them")
    bad.add(3, "tokens", "it has none")
    include_equal_rows(bad, keys)
    table = RowTable()
    table.judge(keys, bad.faults)
    return {
        "bad": {str(row): [fault.reason, fault.message] for row, fault in bad.faults.items()},
        "judged": [table.bad[key] for key in keys],
    }


# Faults of what the engine returns, in the rows of one batch: number of the request -> its completion's output.


def nan_logprob(output: Any) -> None:
    """Report that a sampled token's log-probability is NaN."""
    output.logprobs[-1][output.token_ids[-1]].logprob = float("nan")


def no_routes(output: Any) -> None:
    """Return no routes."""
    output.routed_experts = None


def short_routes(output: Any) -> None:
    """Return routes that lack two tokens."""
    output.routed_experts = output.routed_experts[:-2]


def other_support(output: Any) -> None:
    """Report a sampled token as one that truncation has cut off."""
    position = output.logprobs[1]
    if hasattr(output.logprobs, "left"):
        left = output.logprobs.left
        left._settle()
        ids, counts, cut, sampled = left._read[0]
        counts[:] = 0
        left._read[0] = (ids[:0], counts, cut | True, sampled * 0 - 1)
        return
    position[output.token_ids[1]].logprob = float("-inf")


ENGINE_FAULTS: dict[str, Callable[[Any], None]] = {
    "nan": nan_logprob,
    "no routes": no_routes,
    "short routes": short_routes,
    "support": other_support,
}


@contextlib.contextmanager
def spoiling(trainer: Any, fault: str | None, bad_rows: list[int], batches: list[int]) -> Iterator[dict[str, Any]]:
    """Let the engine's answer have a fault in some rows of some batches; note these rows' tokens whether or not they do."""
    llm = trainer.vllm_generation.llm
    generate, noted = llm.generate, {"batch": 0, "keys": set()}

    def spoiled(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(prompts, *args, **kwargs)
        if "sampling_params" not in kwargs:
            return outputs  # probes of a weight update
        noted["batch"] += 1
        completions = [(output, one) for output in outputs for one in output.outputs]
        if noted["batch"] in batches:
            for row in bad_rows:
                output, completion = completions[row]
                noted["keys"].add((tuple(output.prompt_token_ids), tuple(completion.token_ids)))
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


def trained(
    model: str, out: str, block: Any, fault: str | None, bad_rows: list[int], batches: list[int], **overrides: Any
) -> dict[str, Any]:
    """Train with a fault in some rows of some batches, or without one and with loss weight 0 for these rows."""
    trainer = built(model, out, block, **overrides)
    with spoiling(trainer, fault, bad_rows, batches) as noted:
        if fault is None:
            weigh_nothing(trainer, noted)
        trainer.train()
    run = read_run(trainer.mm.log.run_dir)
    return {
        "parameters": digest_of(trainer.model),
        "steps": trainer.state.global_step,
        "logged": [entry for entry in trainer.state.log_history if "loss" in entry],
        "events": [[event.level, event.message] for event in run.events if event.name == "bad_rows"],
        "kept": sorted(path.name for path in trainer.mm.log.run_dir.glob("evidence-*")),
        "checkpoints": sorted(path.name for path in trainer.mm.log.run_dir.parent.glob("checkpoint-*")),
        "end": [run.segments[-1].status, run.segments[-1].message] if hasattr(run, "segments") else [],
    }


def compared(
    model: str, out: str, block: Any, faults: list[str], bad_rows: list[int], batches: list[int], **overrides: Any
) -> dict[str, Any]:
    """Train with each fault, and without one."""
    return {
        str(fault): trained(model, f"{out}/{fault}", block, fault, bad_rows, batches, **overrides)
        for fault in (None, *faults)
    }
