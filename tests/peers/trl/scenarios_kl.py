"""Runs of the real TRL with a `kl` section."""

from __future__ import annotations

from typing import Any

import pytest
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


def adaptive(model: str, out: str) -> None:
    """Train with an adaptive coefficient, and again from a checkpoint: it goes on where it was."""
    found = []
    for resume in (None, f"{out}/checkpoint-2"):
        block = {"kl": {"coef": 0.1, "target_kl": 1e-4}}
        trainer = build(model, out, block, max_steps=4, save_strategy="steps", save_steps=1)
        trainer.train(resume_from_checkpoint=resume)
        coefficients = [e["mismatch/kl_coef"] for e in trainer.state.log_history if "mismatch/kl_coef" in e]
        assert len(set(coefficients)) == 4
        state = trainer.mm.kl.state_dict()
        trainer.evaluate(rows(2))
        evaluated = trainer.state.log_history[-1]["eval_kl"]
        found.append([coefficients[-2:], state, digest_of(trainer.model), evaluated])
    assert found[0] == found[1] and evaluated > 0


def scheduled(model: str, out: str) -> None:
    """Change TRL's own coefficient: gradients under our term are those under TRL's, and a controller's is not changed."""
    block = {"kl": {"estimator": "k3", "placement": "loss", "target": "token"}}
    found: dict[str, list[Tensor]] = {"stock": [], "ours": []}
    for name, given, cls in (("stock", None, GRPOTrainer), ("ours", block, MismatchGRPOTrainer)):
        trainer = build(model, f"{out}/{name}", given, cls, beta=0.5, use_bias_correction_kl=False)
        moved(trainer)
        inputs = first_batch(trainer)
        for trainer.beta in (0.5, 0.05, 0.0):
            found[name].append(gradients(trainer, trainer.compute_loss(trainer.model, inputs)))
    for ours, stock in zip(found["ours"], found["stock"], strict=True):
        assert relative(ours, stock) < 1e-6
    assert relative(*found["ours"][:2]) > 1e-2
    assert trainer._metrics["train"]["mismatch/kl_coef"] == [0.5, 0.05]
    led = build(model, f"{out}/led", {"kl": {**block["kl"], "coef": 0.5, "target_kl": 0.01}})
    led.beta = 0.1
    with pytest.raises(ConfigError, match="(?s)0.1.*target_kl|target_kl.*0.1"):
        first_batch(led)


class Refilled(MismatchGRPOTrainer):
    """Samples each batch three times, as dynamic sampling does."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        for _ in range(2):
            super()._generate_and_score_completions(inputs)
        return super()._generate_and_score_completions(inputs)


def refilled(model: str, out: str) -> None:
    """Generate several times in each of three steps: the controller moves once a step."""
    trainer = build(model, out, {"kl": {"coef": 0.1, "target_kl": 1e-3}}, Refilled)
    moved(trainer)
    coefficients = set()
    for trainer.state.global_step in range(3):
        trainer._buffered_inputs = None
        first_batch(trainer)
        coefficients.add(trainer.mm.kl.coef)
        assert trainer.mm.kl.state.steps == trainer.state.global_step
    assert len(coefficients) == 3 and trainer.mm.state()["kl"]["steps"] == 3
