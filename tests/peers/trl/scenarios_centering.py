"""Score centering in the real TRL with vLLM: the term in TRL's loss, row by row and by hand, and whole steps."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import itertools
from typing import Any

import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from mismatch_ext.adapters.trl import centering as ours
from mismatch_ext.adapters.vllm import shutdown
from torch import Tensor

from mismatch_ext.centering import EMPTY_TAIL
from mismatch_ext.config import MismatchConfig
from tests.peers.trl.scenarios_kl import moved
from tests.peers.trl.scenarios_training import arguments, build, digest_of, graded, history, rows

TOP_K = 6
WEIGHTS: dict[str, tuple[dict[str, Any], float | None, float | None]] = {
    "none": ({}, None, None),
    "tis": ({"preset": "tis", "upper": 1.05}, 1.05, None),
    "icepop": ({"preset": "icepop", "lower": 0.95, "upper": 1.05}, 1.05, 0.95),
}
"""The weights that centering is combined with: keys of the section, and the bounds by hand."""
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo")
EXACT = {
    "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "max_completion_length": 12, "bf16": False,
    "temperature": 0.8,
}  # fmt: skip
Inputs = dict[str, Any]


def hand_term(trainer: Any, inputs: Inputs, weights: str, loss_type: str, parts: int) -> Tensor:
    """Return the scalar whose gradient centering adds, float64: the formula, row by row, with stopped coefficients."""
    _, upper, lower = WEIGHTS[weights]
    total = torch.zeros((), dtype=torch.float64)
    mask = inputs["completion_mask"].bool() & inputs.get("tool_mask", torch.ones_like(inputs["completion_mask"])).bool()
    count = len(mask)
    for row in range(count):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        answer = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
        logits = trainer.model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1].double()
        logprobs = (logits / trainer.temperature).log_softmax(-1)
        head = trainer.heads[tuple(prompt.tolist()), tuple(answer.tolist())]
        for place in range(len(answer)):
            if not mask[row, place]:
                continue
            ids, q = head.ids[place].long(), head.logprobs[place].double().exp()
            p = logprobs[place, ids].detach().exp()
            # A tail of the policy below this is rounding in float32.
            rho = (1 - q.sum()) / (1 - p.sum()) if 1 - p.sum() >= EMPTY_TAIL else torch.ones(())

            def weigh(ratio: Tensor) -> Tensor:
                if upper is None:
                    return torch.ones_like(ratio)
                if lower is None:
                    return ratio.clamp(max=upper)
                return torch.where((ratio < lower) | (ratio > upper), 0.0, ratio)

            coefficients = q * weigh(p / q) - rho * weigh(1 / rho) * p
            of_token = (coefficients * logprobs[place, ids]).sum()
            divisor = {
                "grpo": count * mask[row].sum() * parts,
                "sapo": count * mask[row].sum() * parts,
                "bnpo": mask.sum() * parts,
                "dr_grpo": count * trainer.max_completion_length * parts,
                "luspo": count * parts,
                "dapo": inputs["num_items_in_batch"] * parts / trainer.args.steps_per_generation,
                "cispo": inputs["num_items_in_batch"] * parts / trainer.args.steps_per_generation,
            }[loss_type]
            slope = min(1.0, trainer.epsilon_high) if loss_type == "cispo" else 1.0
            total = total + inputs["advantages"][row].double() * slope * of_token / divisor
    return total


def gradient(model: torch.nn.Module) -> Tensor:
    """Return the gradient as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def built(model: str, out: str, **overrides: Any) -> Any:
    """Build a trainer with centering whose policy has moved away from the engine's."""
    config = MismatchGRPOConfig(
        **arguments(out, **EXACT, mismatch={"correction": {"centering": {"top_k": TOP_K}}, "monitor": {"weight_sync": "off"}},
                    **overrides)
    )  # fmt: skip
    return MismatchGRPOTrainer(model=model, reward_funcs=graded, args=config, train_dataset=rows())


def sampled(trainer: Any) -> Inputs:
    """Return a batch of real completions of the engine, whose policy is another one than the trainer's."""
    trainer.model.train()
    records: list[Any] = []
    keep = trainer.mm.centering.keep
    trainer.mm.centering.keep = lambda table, found: (records.extend(found), keep(table, found))
    trainer.vllm_generation.sync_weights = lambda *_, **__: None  # the engine keeps the first weights
    batch: Inputs = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    trainer.mm.centering.keep = keep
    trainer.heads = {(_ids(r.prompt_ids), _ids(r.response_ids)): r.head for r in records}
    batch["advantages"] = torch.linspace(-0.5, 1.5, len(batch["advantages"]))
    return batch


def centered_by(section: dict[str, Any], trainer: Any) -> ours.Centering:
    """Return the centering of a section; the trainer's table of rows has kept the sampled batch's heads."""
    block = MismatchConfig.parse({"correction": section})
    assert block is not None
    return ours.Centering(trainer.mm, block)


def _ids(tokens: Any) -> tuple[int, ...]:
    return tuple(int(token) for token in tokens)


def cut(batch: Inputs, chosen: slice) -> Inputs:
    """Return some rows of a batch."""
    size = len(batch["completion_ids"])
    of_rows = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.dim() and len(v) == size}
    return batch | {name: value[chosen] for name, value in of_rows.items()}


def formula(model: str, out: str) -> None:
    """Compare what centering adds to TRL's gradient with the formula by hand, for each loss, weight and accumulation."""
    trainer = built(model, out)
    moved(trainer, 2e-2)
    batch = sampled(trainer)
    torch.set_num_threads(1)
    trainer.model.double()
    tools = torch.ones_like(batch["completion_mask"])
    tools[::2, 1] = 0  # a token that a tool wrote
    for loss_type, weights in itertools.product(LOSSES, WEIGHTS):
        parts = 1 if weights == "none" else 2
        trainer.loss_type = loss_type
        centering = centered_by({**WEIGHTS[weights][0], "centering": {"top_k": TOP_K}}, trainer)
        given = batch | ({"tool_mask": tools} if parts == 2 else {})
        trainer.current_gradient_accumulation_steps = parts
        size = len(batch["completion_ids"]) // parts
        micro = [cut(given, slice(first, first + size)) for first in range(0, parts * size, size)]
        gradients = []
        for term in (centering, ours.Centering(trainer.mm, MismatchConfig())):
            trainer.mm.centering = term
            trainer.model.zero_grad()
            for inputs in micro:
                trainer.compute_loss(trainer.model, dict(inputs)).backward()
            gradients.append(gradient(trainer.model))
        trainer.model.zero_grad()
        for inputs in micro:
            hand_term(trainer, inputs, weights, loss_type, parts).backward()
        hand, (added, without) = gradient(trainer.model), gradients
        # TRL's own numbers, such as advantages, are float32, so that the error is a share of its whole gradient.
        error = float((added - without - hand).norm() / added.norm())
        # The term is no rounding next to the rest of the gradient, so that the comparison can fail.
        effect = float(hand.norm() / without.norm())
        assert error < 1e-6 and effect > 1e-3, (loss_type, weights, error, effect)
        assert centering.metrics()["sampler_bias"] > 1e-3


def trainings(model: str, out: str) -> None:
    """Train a few steps with a correction, with the measurement of centering beside it, and with centering."""
    digests: dict[str, str] = {}
    blocks = {"without": {}, "measured": {"centering": {"top_k": TOP_K, "only_measured": True}}}
    blocks["centered"] = {"centering": {"top_k": TOP_K}}
    for name, section in blocks.items():
        block = {"correction": {"preset": "tis", **section}, "monitor": {"weight_sync": "off"}}
        trainer = build(model, f"{out}/{name}", block)
        trainer.train()
        digests[name] = digest_of(trainer.model)
        biases = [step.get("mismatch/sampler_bias", 0.0) for step in history(trainer)]
        assert any(biases) == all(biases) == (name != "without")
        shutdown(trainer.vllm_generation.llm)
    # Measuring changes no parameter, bit for bit, and centering does.
    assert digests["without"] == digests["measured"] != digests["centered"]
