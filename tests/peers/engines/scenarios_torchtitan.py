"""torchtitan on the plain loop, by examples/third/torchtitan_grpo.py: with vLLM, and with an engine of torch.

torchtitan lies beside the SGLang environment, since it needs the triton that is there (`make setup`).
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm  # noqa: F401 (imported once for all forks)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic.task import FAMILIAR_DIGITS, make_dataset
from mismatch_ext import Run
from mismatch_ext.errors import WeightSyncError
from mismatch_ext.testing import Problem, judge_correction, row_term
from tests.torch_rollout import TorchRollout

ROOT = Path(__file__).resolve().parents[3]
OVERLAY = ROOT / ".venv-sglang/torchtitan"
MODEL = ROOT / "examples/arithmetic/models/dense"
PROMPTS = ("386+47=", "52+9134=")


def without_vllm(out: str, steps: int) -> dict[str, Any]:
    """Compare the example's parts with transformers', and train by its loop with an engine of torch in float16."""
    example = _example()
    return {
        "parts": _parts(example),
        "loss": _loss(example),
        "judged": _judged(example),
        "own_names": _own_names(example, f"{out}/names"),
        "steps": {
            name: _steps(example, f"{out}/{name}", steps, noise) for name, noise in (("run", 0.0), ("noisy", 2.0))
        },
    }


def with_vllm(out: str, steps: int) -> None:
    """Run the example as a script."""
    sys.argv = ["torchtitan_grpo.py", f"--steps={steps}", "--prompts=4", f"--output_dir={out}/run"]
    _example().main()


def _example() -> Any:
    sys.path.append(str(OVERLAY))
    return importlib.import_module("examples.third.torchtitan_grpo")


def _steps(example: Any, out: str, steps: int, noise: float) -> int:
    """Train with the example's block, an alarm that stops where engine and trainer differ, and noise in the engine's logits."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    engine = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float16)
    rollout = TorchRollout(engine, n=4, max_new_tokens=12, noise=noise, dtype="float16")
    alarms = {"logp_abs_diff_mean": {"patience": 1, "action": "stop"}}
    block = {**example.BLOCK, "monitor": {"alarms": alarms}}
    with warnings.catch_warnings(), Run(block, _trainer(example), rollout, out).start() as run:
        warnings.simplefilter("ignore")  # the alarm's
        example.train(run, make_dataset(3 * steps, FAMILIAR_DIGITS), 3, tokenizer)
        return run.steps


def _parts(example: Any) -> dict[str, Any]:
    """Compare log-probabilities, and weights on their way to an engine, with the checkpoint's."""
    trainer = _trainer(example)
    tokens = torch.randint(2, 16, (4, 48), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        logprobs = theirs(input_ids=tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    saved, sent = load_file(MODEL / "model.safetensors"), dict(trainer.checkpoint_parameters())
    return {
        "largest_difference": float((trainer.score(tokens) - logprobs).abs().max()),
        "same_names": sent.keys() == saved.keys(),
        "same_tensors": all(torch.equal(sent[name], tensor) for name, tensor in saved.items()),
        "surplus": str(trainer.surplus()),
    }


def _loss(example: Any) -> list[float]:
    """Return torchtitan's loss of weighed advantages, its gradient's norm, and both of the weights times the clipped loss."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 16, (6, 20), generator=generator)
    mask = torch.rand(labels.shape, generator=generator) < 0.8
    advantages, weights = torch.randn(6, 1, generator=generator), 2 * torch.rand(labels.shape, generator=generator)
    weights[0] = 0.0  # rejected
    old = torch.randn(labels.shape, generator=generator) * 0.3
    old += (
        (start := torch.randn(*labels.shape, 16, generator=generator))
        .log_softmax(-1)
        .gather(-1, labels[..., None])[..., 0]
    )
    found = []
    for theirs in (True, False):
        logits = start.clone().requires_grad_()
        if theirs:
            given = {"generator_logprobs": old, "advantages": weights * advantages, "loss_mask": mask}
            loss, _ = example.GRPOLoss.Config().build()(logits, labels, int(mask.sum()), **given)
        else:
            ratio = (logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0] - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -(weights * gain)[mask].mean()
        loss.backward()
        assert logits.grad is not None and math.isfinite(loss.item())
        found += [float(loss.detach()), float(logits.grad.norm())]
    return found


def _judged(example: Any) -> list[float]:
    """Return the bias of torchtitan's policy loss on its own samples, and on those of another policy without and with weights."""
    policy_loss = example.GRPOLoss.Config().build()

    def loss(logprobs: Tensor, ref_logprobs: Tensor, behavior: Tensor, reward: Tensor, weight: Tensor) -> Tensor:
        # Two tokens whose first has the response's log-probability: torchtitan's loss takes logits.
        logits = torch.stack([logprobs, torch.log1p(-logprobs.exp())], -1)
        given = {"generator_logprobs": logprobs.detach(), "advantages": (weight * reward)[:, None].expand_as(logprobs)}
        labels = torch.zeros(logprobs.shape, dtype=torch.long)
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        return policy_loss(logits, labels, 1, loss_mask=mask, **given)[0]

    biases = []
    for lag, weighed in ((0.0, False), (0.3, False), (0.3, True)):
        problem = Problem.random(3, 4, 0, lag=lag)
        rewards = problem.tree.random_rewards(0)
        ratio = (problem.tree.logprobs(problem.policy) - problem.tree.logprobs(problem.behavior)).sum(1).exp()
        weights = ratio if weighed else torch.ones_like(ratio)
        biases.append(judge_correction(problem, row_term(loss, rewards, weights), rewards).bias)
    return biases


def _own_names(example: Any, out: str) -> str:
    """Return how a run ends whose weights have torchtitan's own names, which the engine does not know."""
    trainer = _trainer(example)

    def unconverted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from trainer.model.named_parameters()

    trainer.checkpoint_parameters = unconverted
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rollout = TorchRollout(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    try:
        with Run({"monitor": {"weight_sync": "error"}}, trainer, rollout, out).start() as run:
            for _ in range(2):
                batch = run.batch(rollout.generate([tokenizer(prompt).input_ids for prompt in PROMPTS]))
                with torch.no_grad():
                    run.measure(batch, old=run.score(batch))
                logprobs = run.score(batch)
                run.step(-logprobs[batch.response_mask].mean())
                run.send()
    except WeightSyncError as error:
        return str(error)
    return ""


def _trainer(example: Any) -> Any:
    return example.TitanTrainer(MODEL, learning_rate=5e-5, steps=8, tokenizer=AutoTokenizer.from_pretrained(MODEL))
