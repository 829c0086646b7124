"""Your own loop over small models, for the tests of `Run`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.side import TrainedModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from mismatch_ext import Run
from mismatch_ext.rollout import Batch
from tests.torch_rollout import Recurrent, TorchRollout, recurrent_logits

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
        run.measure(batch, old=old, reference=ref)
        advantages = rewards_of(batch)
        weights = run.correct(batch, old, advantages=advantages[:, 0]).as_multiplier()
        logprobs = run.score(batch)
        ratio = (logprobs - old).exp()
        loss = (run.kl(batch, logprobs=logprobs, reference=ref) - weights * ratio * advantages)[
            batch.response_mask
        ].mean()
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


KL = {"kl": {"coef": 0.1}}


EVERYTHING: dict[str, Any] = {
    "correction": {"preset": "slime_mis"},
    "kl": {"coef": 0.05, "target_kl": 0.01},
    "lr": {"baseline_window": 2, "surge_ratio": 1.001},
}


class Two:
    """Ranks of two, of which the other has said this of what it was asked for last."""

    size = 2

    def __init__(self, rank: int = 0, *, sums: float = 0.0, said: Any = None) -> None:
        self.rank, self.sums, self.said = rank, sums, said
        self.asked: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.asked.append(value)
        # Of metrics a rank says a mapping; what is of the same kind is merged, but for the state of a measurement.
        state = isinstance(value, dict) and "version" in value
        merged = value is not None and isinstance(self.said, type(value)) and not state
        return [value, type(value)(self.said) if merged else value]

    def sum(self, values: Tensor) -> Tensor:
        self.asked.append(values)
        return values + torch.full_like(values, self.sums)


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
