"""Score centering on two ranks: one step of DDP, each rank with an engine, against one process that does it by hand."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from tests.peers.trl.scenarios_centering import hand_term
from tests.peers.trl.scenarios_kl import moved
from tests.peers.trl.scenarios_ranks import build, logged, main

TOP_K, RATE = 6, 0.1
EXACT = {
    "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "learning_rate": RATE, "max_completion_length": 8,
    "bf16": False, "max_steps": 1, "loss_type": "grpo",
}  # fmt: skip


def flat(model: torch.nn.Module) -> Tensor:
    """Return the parameters as one vector, float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def step(model: str, out: str) -> dict[str, Any]:
    """Take one step on two ranks, and make it again in one process from what both ranks have sampled."""
    block = {"correction": {"centering": {"top_k": TOP_K}}, "monitor": {"weight_sync": "off"}}
    trainer: Any = build(model, out, block, use_vllm=True, **EXACT)
    moved(trainer, 2e-2)
    trainer.vllm_generation.sync_weights = lambda *_, **__: None  # the engine keeps the first weights
    begun = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    before = flat(trainer.model)
    given: list[Any] = []
    records: list[Any] = []
    tokens: list[float] = []
    compute, keep, metrics = trainer.compute_loss, trainer.mm.centering.keep, trainer.mm.centering.metrics

    def computed(host: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        given.append({name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()})
        return compute(host, inputs, *args, **kwargs)

    def counted() -> Any:
        tokens.extend(trainer.mm.centering._biases.tolist())
        return metrics()

    trainer.compute_loss, trainer.mm.centering.metrics = computed, counted
    trainer.mm.centering.keep = lambda table, found: (records.extend(found), keep(table, found))
    trainer.train()
    after = flat(trainer.model)

    # One process from here on: both ranks do the same, and neither asks the other.
    mine = [(r.prompt_ids.tolist(), r.response_ids.tolist(), r.head) for r in records]
    trainer.heads = {(tuple(p), tuple(c)): head for p, c, head in gather_object(mine)}
    parts = gather_object(given)
    trainer.model.load_state_dict(begun)
    trainer.compute_loss = compute
    gradients = {}
    for name in ("by hand", "without"):
        trainer.model.zero_grad()
        for inputs in parts:
            policy = trainer.model
            prompt = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            length = inputs["completion_ids"].shape[1]
            logits = policy(input_ids=prompt, attention_mask=mask).logits[:, -length - 1 : -1] / trainer.temperature
            logprobs = logits.log_softmax(-1).gather(2, inputs["completion_ids"][:, :, None])[:, :, 0]
            # At the policy that scored the batch, the ratio is 1 and its gradient is the score.
            kept = inputs["completion_mask"]
            of_row = (-logprobs * inputs["advantages"][:, None] * kept).sum(1) / kept.sum(1)
            loss = of_row.mean()
            if name == "by hand":
                loss = loss + hand_term(trainer, inputs, "none", "grpo", 1)
            (loss / len(parts)).backward()
        gradients[name] = torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trainer.model.parameters()]
        ).double()
    taken = (before - after) / RATE
    size = gradients["by hand"].norm()
    return {
        "error": float((taken - gradients["by hand"]).norm() / size),
        "effect": float((taken - gradients["without"]).norm() / size),
        "rows": [len(inputs["completion_ids"]) for inputs in parts],
        "tokens": tokens,
        "logged": logged(trainer)[0]["mismatch/sampler_bias"],
        "own heads": len({(p.tobytes(), c.tobytes()) for p, c in ((r.prompt_ids, r.response_ids) for r in records)}),
    }


if __name__ == "__main__":
    main(globals())
