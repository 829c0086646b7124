"""Runs of the real TRL with a `kl` section."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin
from mismatch_ext.adapters.trl.overridden import overridden
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.config import ESTIMATORS
from mismatch_ext.errors import ConfigError
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

PLACEMENTS = ("loss", "reward", "both")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def build(model: str, out: str, block: Any, cls: Any = MismatchGRPOTrainer, **overrides: Any) -> Any:
    """Build a trainer that generates with transformers: the loss is the same and no engine has to start."""
    config_class = MismatchGRPOConfig if issubclass(cls, MismatchTrainerMixin) else GRPOConfig
    given = {"mismatch": block} if block is not None else {}
    config = config_class(**arguments(out, **{"use_vllm": False, "bf16": False, **given, **overrides}))
    return cls(model=model, reward_funcs=graded, args=config, train_dataset=rows())


def moved(trainer: Any, scale: float = 0.05) -> None:
    """Move the policy away from the reference, so that their KL is not zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def every_configuration(model: str, out: str) -> dict[str, Any]:
    """Train three steps for every estimator and placement."""
    result = {}
    for estimator, placement in itertools.product(ESTIMATORS, PLACEMENTS):
        block = {"kl": {"estimator": estimator, "placement": placement, "coef": 0.1}}
        trainer = build(model, f"{out}/{estimator}-{placement}", block)
        moved(trainer)
        before = digest_of(trainer.model)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        result[f"{estimator}/{placement}"] = {
            "steps": len(logged),
            "loss": [entry["loss"] for entry in logged],
            "grad_norm": [entry["grad_norm"] for entry in logged],
            "kl": [entry["kl"] for entry in logged],
            "changed": digest_of(trainer.model) != before,
        }
    return result


def first_batch(trainer: Any) -> Any:
    """Return the first micro-batch that the trainer would compute its loss on."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def gradients(trainer: Any, loss: Tensor) -> Tensor:
    """Return the gradient of a loss as one vector, float64."""
    trainer.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten().double() for p in trainer.model.parameters() if p.grad is not None])


def relative(a: Tensor, b: Tensor) -> float:
    """Return the relative distance of two vectors."""
    return float((a - b).norm() / b.norm())


def denominators(model: str, out: str) -> dict[str, Any]:
    """Compare the gradient of our k3 term with that of TRL's own, for every `loss_type`."""
    result = {}
    block = {"kl": {"estimator": "k3", "placement": "loss", "target": "token", "coef": 0.3}}
    for loss_type in LOSSES:
        level = "sequence" if loss_type == "luspo" else "token"
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer = build(
                model, f"{out}/{loss_type}", block, loss_type=loss_type, use_bias_correction_kl=False,
                importance_sampling_level=level, max_completion_length=12, gradient_accumulation_steps=2,
                steps_per_generation=2,
            )  # fmt: skip
        moved(trainer)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        ours = gradients(trainer, trainer.compute_loss(trainer.model, inputs))
        with overridden(trainer.mm, kl=None), overridden(trainer.mm.objective, sections=()):
            theirs = gradients(trainer, trainer.compute_loss(trainer.model, inputs))
            with overridden(trainer, beta=0.0):
                without = gradients(trainer, trainer.compute_loss(trainer.model, inputs))
        ragged = any("docs/kl.md" in str(warning.message) for warning in warned)
        result[loss_type] = {
            "error": relative(ours, theirs),
            "share_of_kl": relative(without, theirs),
            "ragged": ragged,
        }
    return result


def first_step(model: str, out: str, kl: dict[str, Any]) -> dict[str, Any]:
    """Compare the gradient of the first step with one computed by hand from the model's plain forward."""
    trainer = build(
        model, out, {"kl": {"baseline": "none", **kl, "coef": 0.3}}, loss_type="dr_grpo", max_completion_length=12
    )
    moved(trainer)
    inputs = first_batch(trainer)
    ours = gradients(trainer, trainer.compute_loss(trainer.model, inputs))

    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = inputs["completion_mask"].double()
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = mask.size(1)
    logits = trainer.model(input_ids=tokens, attention_mask=attention).logits[:, -length - 1 : -1].double()
    logps = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
    # At the first step the ratio is 1: the policy term's gradient is that of -A log pi, the KL term's that of
    # sg(G_t) log pi_t + k_t, with G_t the sum of all k from token t on; both over B times the maximal length.
    d = logps - inputs["ref_per_token_logps"].double()
    k = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d, "abs": d.abs()}[kl["estimator"]] * mask
    credit = k.flip(1).cumsum(1).flip(1) if kl.get("target", "sequence") == "sequence" else k
    credit = credit.detach()
    prompts = [tuple(row.tolist()) for row in inputs["prompt_ids"]]
    if kl.get("baseline") == "leave_one_out":
        credit = credit - others_of_the_prompt(credit, mask, prompts)
    parts = {"loss": k, "reward": credit * logps, "both": k + credit * logps}
    term = -inputs["advantages"].double()[:, None] * logps + 0.3 * parts[kl["placement"]]
    by_hand = gradients(trainer, (term * mask).sum() / (len(mask) * trainer.max_completion_length))
    return {"error": relative(ours, by_hand), "prompts": len(set(prompts)), "rows": len(prompts)}


class Best(GRPOTrainer):
    """Keeps one completion of each group, in all of the group's rows."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        rows = torch.arange(len(output["completion_ids"])) // self.num_generations * self.num_generations
        return {
            name: value[rows] if torch.is_tensor(value) and value.dim() else value for name, value in output.items()
        }


class BestBelow(MismatchTrainerMixin, Best):
    """The same with a block, which sees the rows that were kept."""


def baselines(model: str, out: str) -> dict[str, Any]:
    """Compare the baseline of a batch that is split over four micro-batches with one by hand; return that of copies."""
    block = {"kl": {"estimator": "k1", "placement": "reward", "coef": 0.3}}
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer = build(model, out, block, **small)
    moved(trainer)
    parts = buffered(trainer)
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "num_items_in_batch"}
    mask = whole["completion_mask"].double()
    tokens = torch.cat([whole["prompt_ids"], whole["completion_ids"]], dim=1)
    attention = torch.cat([whole["prompt_mask"], whole["completion_mask"]], dim=1)
    with torch.no_grad():
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, attention, mask.size(1))[0]
    credit = ((logps - whole["ref_per_token_logps"]).double() * mask).flip(1).cumsum(1).flip(1)
    hand = others_of_the_prompt(credit, mask, [tuple(row.tolist()) for row in whole["prompt_ids"]])
    copies = build(model, f"{out}/copies", block, BestBelow, **small)
    moved(copies)
    return {
        "error": relative(whole["mismatch_kl_baseline"].double(), hand),
        "lone": float((whole["mismatch_kl_baseline"] == 0).all(1).float().mean()),
        "copies": max(float(part["mismatch_kl_baseline"].abs().max()) for part in buffered(copies)),
    }


def buffered(trainer: Any) -> Any:
    """Return the micro-batches of the first batch."""
    first_batch(trainer)
    return trainer._buffered_inputs


def others_of_the_prompt(credit: Tensor, mask: Tensor, prompts: list[Any]) -> Tensor:
    """Return for each token the mean credit of the same prompt's other responses at its place, 0 where none is as long."""
    baseline = torch.zeros_like(credit)
    for row, place in mask.bool().nonzero().tolist():
        others = [
            credit[other, place]
            for other in range(len(prompts))
            if other != row and prompts[other] == prompts[row] and mask[other, place]
        ]
        if others:
            baseline[row, place] = sum(others) / len(others)
    return baseline


def rewards_path(model: str, out: str) -> dict[str, Any]:
    """Return TRL's advantages with the KL in the rewards, and those computed by hand."""
    trainer = build(
        model, out, {"kl": {"estimator": "k1", "placement": "reward", "reward_path": "rewards", "coef": 0.5}},
        reward_weights=[2.0],
    )  # fmt: skip
    moved(trainer)
    seen: dict[str, Tensor] = {}
    plain = trainer._calculate_rewards

    def spied(*args: Any) -> Tensor:
        seen["rewards"] = plain(*args)
        return seen["rewards"]

    trainer._calculate_rewards = spied
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    with torch.no_grad():
        output = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
        tokens = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        length = output["completion_ids"].size(1)
        logits = trainer.model(input_ids=tokens, attention_mask=attention).logits[:, -length - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, output["completion_ids"][..., None])[..., 0]
    kl = ((logps - output["ref_per_token_logps"]) * output["completion_mask"]).sum(1)
    total = 2.0 * seen["rewards"][:, 0] - 0.5 * kl
    groups = total.view(-1, trainer.num_generations)
    by_hand = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    return {
        "names": trainer.reward_func_names,
        "kl_error": float((seen["rewards"][:, 1] + 0.5 * kl).abs().max()),
        "advantage_error": float((output["advantages"] - by_hand).abs().max()),
        "spread": float(kl.std()),
    }


def other_settings(model: str, out: str) -> dict[str, list[float]]:
    """Train with LoRA, several iterations, accumulation, bf16 and evaluation."""
    from peft import LoraConfig

    block = {"kl": {"coef": 0.1, "ratio": "sequence"}}
    config = MismatchGRPOConfig(
        **arguments(
            out, use_vllm=False, bf16=True, mismatch=block, num_iterations=2, max_steps=4,
            gradient_accumulation_steps=2, steps_per_generation=2, gradient_checkpointing=True,
            per_device_eval_batch_size=8, eval_strategy="steps", eval_steps=2,
        )
    )  # fmt: skip
    trainer = MismatchGRPOTrainer(
        model=model, reward_funcs=graded, args=config, train_dataset=rows(), eval_dataset=rows(2),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False),
    )  # fmt: skip
    trainer.train()
    history = trainer.state.log_history
    return {
        "kl": [e["kl"] for e in history if "loss" in e],
        "eval_kl": [e["eval_kl"] for e in history if "eval_kl" in e],
        "eval_loss": [e["eval_loss"] for e in history if "eval_loss" in e],
        "grad_norm": [e["grad_norm"] for e in history if "loss" in e],
    }


def adaptive(model: str, out: str, resume: str | None = None) -> dict[str, Any]:
    """Train with an adaptive coefficient, saving each step; possibly resume."""
    block = {"kl": {"coef": 0.1, "target_kl": 1e-4}}
    trainer = build(model, out, block, max_steps=4, save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=resume)
    logged = [e["mismatch/kl_coef"] for e in trainer.state.log_history if "mismatch/kl_coef" in e]
    return {"coef": logged, "state": trainer.mm.kl.state_dict(), "parameters": digest_of(trainer.model)}


def scheduled(model: str, out: str) -> dict[str, Any]:
    """Change TRL's own coefficient; compare gradients under our term with those under TRL's, and say what is refused."""
    block = {"kl": {"estimator": "k3", "placement": "loss", "target": "token"}}
    found: dict[str, list[Tensor]] = {"stock": [], "ours": []}
    for name, given, cls in (("stock", None, GRPOTrainer), ("ours", block, MismatchGRPOTrainer)):
        trainer = build(model, f"{out}/{name}", given, cls, beta=0.5, use_bias_correction_kl=False)
        moved(trainer)
        inputs = first_batch(trainer)
        for trainer.beta in (0.5, 0.05, 0.0):
            found[name].append(gradients(trainer, trainer.compute_loss(trainer.model, inputs)))
    logged = trainer._metrics["train"]["mismatch/kl_coef"]
    led = build(model, f"{out}/led", {"kl": {**block["kl"], "coef": 0.5, "target_kl": 0.01}})
    led.beta, refused = 0.1, ""
    try:
        first_batch(led)
    except ConfigError as error:
        refused = str(error)
    errors = [relative(ours, stock) for ours, stock in zip(found["ours"], found["stock"], strict=True)]
    return {
        "errors": errors,
        "effect": relative(found["ours"][0], found["ours"][1]),
        "coef": logged,
        "refused": refused,
    }


class Refilled(MismatchGRPOTrainer):
    """Samples each batch three times, as dynamic sampling does."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        for _ in range(2):
            super()._generate_and_score_completions(inputs)
        return super()._generate_and_score_completions(inputs)


def refilled(model: str, out: str) -> dict[str, Any]:
    """Generate several times in each of three steps with an adaptive coefficient; return that of each step, and its updates."""
    trainer = build(model, out, {"kl": {"coef": 0.1, "target_kl": 1e-3}}, Refilled)
    moved(trainer)
    steps = []
    for trainer.state.global_step in range(3):
        trainer._buffered_inputs = None
        first_batch(trainer)
        steps.append((trainer.mm.kl.coef, trainer.mm.kl.state.steps))
    return {"steps": steps, "saved": trainer.mm.state()["kl"]["steps"]}
