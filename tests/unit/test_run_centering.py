"""Score centering in your own loop: the term, its metric, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext import Run
from mismatch_ext.errors import ConfigError, LoopError, RecordError
from mismatch_ext.rollout import Batch
from tests.torch_rollout import TorchRollout, recurrent_logits
from tests.unit.loops import PROMPTS, learn, rewards_of, same, sides, weights

TOP_K = 5
CENTERED: dict[str, Any] = {"correction": {"centering": {"top_k": TOP_K}}}
WITH_TIS: dict[str, Any] = {"correction": {"preset": "tis", "upper": 1.02, "centering": {"top_k": TOP_K}}}
MEASURED: dict[str, Any] = {"correction": {"centering": {"top_k": TOP_K, "only_measured": True}}}


def started(block: dict[str, Any], folder: Path, **options: Any) -> Run:
    """Return a run that has begun."""
    return Run(block, *sides(noise=0.3, **options), folder).start()


def by_hand(run: Run, batch: Batch, advantages: Tensor, upper: float | None) -> tuple[Tensor, list[float]]:
    """Return the scalar whose gradient centering adds to a mean over tokens, row by row, and the bias of each token."""
    total, biases = torch.zeros((), dtype=torch.float64), []
    model: Any = run.trainer.policy()
    for row, record in enumerate(batch.records):
        assert record.head is not None
        tokens = torch.tensor([[*record.prompt_ids, *record.response_ids]])
        logprobs = model(tokens)[0, len(record.prompt_ids) - 1 : -1].double().log_softmax(-1)
        for place in range(len(record.response_ids)):
            ids, q = record.head.ids[place].long(), record.head.logprobs[place].double().exp()
            p = logprobs[place].detach().exp()
            rho = (1 - q.sum()) / (1 - p[ids].sum())
            full = rho * p
            full[ids] = q
            weight = p / full if upper is None else (p / full).clamp(max=upper)
            weight = torch.ones_like(p) if upper is None else weight
            # The expected score over the whole vocabulary, whose tail is the policy's, scaled.
            total = total + advantages[row, 0].double() * (full * weight * logprobs[place]).sum()
            biases.append(float((full * weight - p * (full * weight).sum()).norm()))
    return total / len(biases), biases


@pytest.mark.parametrize(("block", "upper"), [(CENTERED, None), (WITH_TIS, 1.02)])
def test_the_term_is_the_expected_score(block: dict[str, Any], upper: float | None, tmp_path: Path) -> None:
    with started(block, tmp_path) as run:
        batch = run.batch(run.rollout.generate(PROMPTS))
        advantages = rewards_of(batch)
        gradients = []
        term = run.center(batch, advantages)
        hand, biases = by_hand(run, batch, advantages, upper)
        for value in (term[batch.response_mask].mean(), hand):
            parameters = [parameter for _, parameter in run.trainer.named_parameters()]
            gradients.append(torch.cat([g.flatten().double() for g in torch.autograd.grad(value, parameters)]))
        assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-5
        assert float(gradients[1].norm()) > 1e-3
        with torch.no_grad():
            old = run.score(batch)
        run.measure(batch, old=old)
        weighed = run.correct(batch, old).as_multiplier()
        ratio = (run.score(batch) - old).exp()
        run.step((run.center(batch, advantages) - weighed * ratio * advantages)[batch.response_mask].mean())
        run.send()
        logged = run.log(reward=advantages).metrics["mismatch/sampler_bias"]
    assert logged == pytest.approx(sum(biases) / len(biases), rel=1e-4)


def test_measuring_changes_no_weight(tmp_path: Path) -> None:
    found: list[tuple[Any, Any]] = []
    for block in ({"correction": {"preset": "disabled"}}, MEASURED):
        with started(block, tmp_path / str(len(found))) as run:
            logs = learn(run, 2)
            found.append((weights(run.trainer), logs))  # type: ignore[arg-type]
    assert same(found[0][0], found[1][0])
    assert "mismatch/sampler_bias" not in found[0][1][0]


def test_a_step_without_the_term_is_refused(tmp_path: Path) -> None:
    with started(CENTERED, tmp_path) as run, pytest.raises(LoopError, match=r"centering is on.*run\.center\(batch"):
        learn(run, 1)


def test_rollouts_without_a_head_are_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    early = rollout.generate(PROMPTS)
    with Run(CENTERED, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(early)
        with pytest.raises(RecordError, match="these rollouts have no head"):
            run.center(batch, rewards_of(batch))


class Silent(TorchRollout):
    """An engine that reports the sampled tokens alone."""

    record_heads = None  # type: ignore[assignment]


def test_an_engine_that_cannot_report_its_tokens_is_refused(tmp_path: Path) -> None:
    trainer, _ = sides()
    rollout = Silent(trainer.model, recurrent_logits)
    with pytest.raises(ConfigError, match="Silent has no record_heads"):
        Run(CENTERED, trainer, rollout, tmp_path).start()
