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
from torch import Tensor

from mismatch_ext.centering import EMPTY_TAIL
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError
from tests.peers.trl.scenarios_kl import moved
from tests.peers.trl.scenarios_training import arguments, build, graded, history, rows

TOP_K, STEP = 6, 1e-5
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


def knowing(trainer: Any, block: MismatchConfig | None) -> ours.Centering:
    """Return the centering of a config; the trainer's table of rows has kept the sampled batch's heads."""
    assert block is not None
    return ours.Centering(trainer.mm, block)


def _ids(tokens: Any) -> tuple[int, ...]:
    return tuple(int(token) for token in tokens)


def cut(batch: Inputs, chosen: slice) -> Inputs:
    """Return some rows of a batch."""
    size = len(batch["completion_ids"])
    of_rows = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.dim() and len(v) == size}
    return batch | {name: value[chosen] for name, value in of_rows.items()}


def formula(model: str, out: str) -> dict[str, Any]:
    """Compare what centering adds to TRL's gradient with the formula by hand, for each loss, weight and accumulation."""
    trainer = built(model, out)
    moved(trainer, 2e-2)
    batch = sampled(trainer)
    torch.set_num_threads(1)
    trainer.model.double()
    tools = torch.ones_like(batch["completion_mask"])
    tools[::2, 1] = 0  # a token that a tool wrote
    found = []
    for loss_type, weights, parts in itertools.product(LOSSES, WEIGHTS, (1, 2)):
        trainer.loss_type = loss_type
        section = {**WEIGHTS[weights][0], "centering": {"top_k": TOP_K}}
        block = MismatchConfig.parse({"correction": section})
        centering = knowing(trainer, block)
        given = batch | ({"tool_mask": tools} if parts == 2 else {})
        trainer.current_gradient_accumulation_steps = parts
        size = len(batch["completion_ids"]) // parts
        micro = [cut(given, slice(first, first + size)) for first in range(0, parts * size, size)]
        gradients = []
        for added in (True, False):
            trainer.mm.centering = centering if added else ours.Centering(trainer.mm, MismatchConfig())
            trainer.model.zero_grad()
            for inputs in micro:
                trainer.compute_loss(trainer.model, dict(inputs)).backward()
            gradients.append(gradient(trainer.model))
        trainer.model.zero_grad()
        for inputs in micro:
            hand_term(trainer, inputs, weights, loss_type, parts).backward()
        hand, difference = gradient(trainer.model), gradients[0] - gradients[1]
        found.append({
            "case": f"{loss_type}, {weights}, {parts}",
            # TRL's own numbers, such as advantages, are float32, so that the error is a share of its whole gradient.
            "error": float((difference - hand).norm() / gradients[0].norm()),
            "effect": float(hand.norm() / gradients[1].norm()),
            "bias": centering.metrics()["sampler_bias"],
        })  # fmt: skip
    return {"cases": found, "differences": differences(trainer, batch), "refused": refused(model, out)}


def differences(trainer: Any, batch: Inputs) -> list[float]:
    """Return the errors of a gradient along drawn directions, in norms of it, by central differences of the term by hand.

    The output head alone moves: the model's norms compute in float32, whatever its dtype.
    """
    trainer.model.zero_grad()
    trainer.loss_type, trainer.current_gradient_accumulation_steps = "grpo", 1
    block = MismatchConfig.parse({"correction": {"centering": {"top_k": TOP_K}}})
    centering = knowing(trainer, block)
    trainer.mm.centering = ours.Centering(trainer.mm, MismatchConfig())
    trainer.compute_loss(trainer.model, dict(batch)).backward()
    head = trainer.model.get_output_embeddings().weight
    without = head.grad.clone()
    trainer.model.zero_grad()
    trainer.mm.centering = centering
    trainer.compute_loss(trainer.model, dict(batch)).backward()
    errors, draws = [], torch.Generator().manual_seed(0)
    stopped = coefficients(trainer, batch)
    for _ in range(3):
        direction = torch.randn(head.shape, generator=draws, dtype=torch.float64)
        slope = float(((head.grad - without) * direction).sum())
        values = []
        for step in (STEP, -2 * STEP):
            with torch.no_grad():
                head.add_(direction, alpha=step)
                values.append(value(trainer, batch, stopped))
        with torch.no_grad():
            head.add_(direction, alpha=STEP)
        errors.append(abs((values[0] - values[1]) / (2 * STEP) - slope) / float((head.grad - without).norm()))
    return errors


def coefficients(trainer: Any, batch: Inputs) -> list[Tensor]:
    """Return the coefficients of each row's head `[T, K]` at the present weights."""
    found = []
    for logprobs, head in _of_rows(trainer, batch):
        q, p = head.logprobs.double().exp(), logprobs.gather(1, head.ids.long()).detach().exp()
        tail = 1 - p.sum(1, keepdim=True)
        rho = torch.where(tail >= EMPTY_TAIL, (1 - q.sum(1, keepdim=True)) / tail, 1.0)
        found.append(q - rho * p)
    return found


def value(trainer: Any, batch: Inputs, stopped: list[Tensor]) -> float:
    """Return the term's value with these coefficients, as `loss_type="grpo"` weighs it."""
    total = 0.0
    with torch.no_grad():
        for (logprobs, head), fixed, advantage in zip(
            _of_rows(trainer, batch), stopped, batch["advantages"], strict=True
        ):
            terms = (fixed * logprobs.gather(1, head.ids.long())).sum(1)
            total += float(advantage * terms.mean()) / len(stopped)
    return total


def _of_rows(trainer: Any, batch: Inputs) -> list[tuple[Tensor, Any]]:
    found = []
    for row in range(len(batch["completion_ids"])):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        answer = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        logits = trainer.model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1].double()
        head = trainer.heads[tuple(prompt.tolist()), tuple(answer.tolist())]
        found.append(((logits / trainer.temperature).log_softmax(-1), head))
    return found


def refused(model: str, out: str) -> dict[str, str]:
    """Return the messages of settings that centering is not for."""
    cases: dict[str, dict[str, Any]] = {
        "vespo": {"loss_type": "vespo"},
        "sequence": {"importance_sampling_level": "sequence"},
        "iterations": {"num_iterations": 2},
        "entropy": {"top_entropy_quantile": 0.5},
        "opsm": {"off_policy_mask_threshold": 0.5},
        "stale": {"steps_per_generation": 2},
    }
    found = {}
    for name, settings in cases.items():
        block = {"correction": {"centering": {"top_k": TOP_K}}}
        try:
            MismatchGRPOConfig(**arguments(out, mismatch=block, **settings))
        except ConfigError as error:
            found[name] = str(error)
    return found


def trainings(model: str, out: str) -> dict[str, Any]:
    """Train a few steps without the key, with its measurement alone, and with centering, and without vLLM's patch."""
    blocks: dict[str, Any] = {
        "stock": {"monitor": {"weight_sync": "off"}},
        "measured/stock": {"correction": {"centering": {"top_k": TOP_K, "only_measured": True}},
                           "monitor": {"weight_sync": "off"}},
        "without": {"correction": {"preset": "tis"}, "monitor": {"weight_sync": "off"}},
        "measured": {"correction": {"preset": "tis", "centering": {"top_k": TOP_K, "only_measured": True}},
                     "monitor": {"weight_sync": "off"}},
        "centered": {"correction": {"preset": "tis", "centering": {"top_k": TOP_K}}, "monitor": {"weight_sync": "off"}},
    }  # fmt: skip
    from mismatch_ext.adapters.vllm import shutdown

    from tests.peers.trl.scenarios_training import digest_of

    found: dict[str, Any] = {}
    for name, block in blocks.items():
        trainer = build(model, f"{out}/{name}", block)
        trainer.train()
        found[name] = {"history": history(trainer), "parameters": digest_of(trainer.model)}
        if name == "centered":
            found["heads"] = heads(trainer)
            engine = trainer.vllm_generation.llm.llm_engine.model_config
            found["max_logprobs"] = engine.max_logprobs
        shutdown(trainer.vllm_generation.llm)
    return found


def heads(trainer: Any) -> dict[str, Any]:
    """Return whether heads are the same from the engine's arrays and from vLLM's objects, and what they take."""
    taking = ours.EngineHeads.patches
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    found = {}
    trainer.vllm_generation.temperature = 1e-3  # the same tokens in both
    for name in ("kept", "listed"):
        if name == "listed":
            ours.EngineHeads.patches = property(lambda self: ())  # type: ignore[assignment,method-assign]
        records: list[Any] = []
        with trainer.mm.checked.keeping(records):
            result = trainer.vllm_generation.generate(prompts, None, 1)
        found[name] = [
            (_ids(r.response_ids), list(r.rollout_logprobs), r.head.ids.tolist(), r.head.logprobs.tolist())
            for r in records
        ]
        found[f"{name}/width"] = [len(top) for row in result[2] for top in row]
        found["bytes"] = [(r.head.ids.nbytes + r.head.logprobs.nbytes) / len(r.head) for r in records]
    ours.EngineHeads.patches = taking  # type: ignore[method-assign]
    return {"equal": found["kept"] == found["listed"], **found}
