"""Runs of the real TRL with a `kl` section."""

from __future__ import annotations

from typing import Any

import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import ConfigError
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows


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


def adaptive(model: str, out: str, resume: str | None = None) -> dict[str, Any]:
    """Train with an adaptive coefficient, saving each step; possibly resume."""
    block = {"kl": {"coef": 0.1, "target_kl": 1e-4}}
    trainer = build(model, out, block, max_steps=4, save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=resume)
    logged = [e["mismatch/kl_coef"] for e in trainer.state.log_history if "mismatch/kl_coef" in e]
    state = trainer.mm.kl.state_dict()
    trainer.evaluate(rows(2))
    evaluated = trainer.state.log_history[-1]["eval_kl"]
    return {"coef": logged, "state": state, "parameters": digest_of(trainer.model), "eval_kl": evaluated}


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
