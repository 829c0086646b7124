"""Your own loop against the same loop by hand in float64: corrections, KL and rate of random blocks, with clipped SGD steps.

Several micro-batches per batch, batches per step and steps per batch. Only `Run` knows the block; the other side is made of the
references in loops and of torch.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mismatch_ext import PRESETS, Run
from mismatch_ext.config import ESTIMATORS, CorrectionConfig
from mismatch_ext.presets import ResolvedCorrection, resolve
from mismatch_ext.rollout import Batch
from tests.oracles.brute import kl as brute_kl
from tests.oracles.brute.correction import weights_and_mask
from tests.oracles.kl.facts import PLAIN
from tests.unit.loops import PROMPTS, rewards_of, sides

pytestmark = pytest.mark.numeric

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 260))]


class Case:
    """A random block, in the words of the references."""

    def __init__(self, rng: random.Random) -> None:
        self.block: dict[str, Any] = {"monitor": {"weight_sync": "off"}}
        self.kl: brute_kl.Asked | None = None
        self.correction = ResolvedCorrection()
        if rng.random() < 0.8:
            self.kl = brute_kl.Asked(
                estimator=rng.choice(ESTIMATORS),
                placement=rng.choice(["loss", "reward", "both"]),
                target=rng.choice(["token", "sequence"]),
                ratio=rng.choice(["none", "token", "sequence"]),
                baseline=rng.choice(["none", "leave_one_out"]),
                coef=0.3,
            )
            self.block["kl"] = vars(self.kl)
        if rng.random() < 0.7:
            section = {"preset": rng.choice([name for name in PRESETS if name != "opsm"])}
            if PRESETS[section["preset"]].level != "none" and PRESETS[section["preset"]].upper:
                section["upper"] = 1.02
            self.block["correction"] = section
            self.correction = resolve(CorrectionConfig(**section))
        self.period = rng.choice([None, 1, 2])
        if self.period is not None:
            self.block["lr"] = {"period": self.period}
        self.epochs, self.batches = rng.choice([1, 2]), rng.choice([1, 1, 2])
        self.parts = 1 if self.correction.normalize else rng.choice([1, 2])

    def micro_batches(self, rows: int) -> list[tuple[int, int]]:
        """Return first and last row of each; all responses of a prompt stay together."""
        half = len(PROMPTS) // 2 * (rows // len(PROMPTS))
        return [(0, rows)] if self.parts == 1 else [(0, half), (half, rows)]

    def policy_loss(self, weights: Tensor, advantages: Tensor, logprobs: Tensor, old: Tensor, mu: Tensor) -> Tensor:
        if self.correction.loss == "reinforce":
            return -weights * advantages * logprobs
        sampled_by = mu if self.correction.mode == "bypass" else old
        return -weights * advantages * (logprobs - sampled_by).exp()

    def by_hand(self, batch: Batch, logprobs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of each token by the references."""
        mask, mu = batch.response_mask, batch.rollout_logprobs.double()
        policy = logprobs.detach() if self.correction.mode == "bypass" else old
        weights, kept = weights_and_mask(mu, policy, mask, self.correction, advantages[:, 0], None)
        loss = self.policy_loss(weights * kept, advantages.double(), logprobs, old, mu)
        if self.kl is None:
            return loss
        estimates = PLAIN[self.kl.estimator](logprobs - reference)
        groups = [PROMPTS.index(list(record.prompt_ids)) for record in batch.records]
        return loss + brute_kl.loss_terms(self.kl, logprobs, estimates, mu, mask, groups)


def scored(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probabilities of the responses, each row on its own."""
    rows = []
    for record in batch.records:
        logprobs = model(torch.tensor([[*record.prompt_ids, *record.response_ids]]))[0].log_softmax(-1)
        first = len(record.prompt_ids) - 1
        tokens = [logprobs[first + t, token] for t, token in enumerate(record.response_ids)]
        padding = logprobs.new_zeros(batch.response_mask.shape[1] - len(tokens))
        rows.append(torch.cat([torch.stack(tokens), padding]))
    return torch.stack(rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_parameters_after_each_step(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    case = Case(rng)
    trainer, rollout = sides(seed, noise=rng.choice([0.05, 0.3]), rate=0.02, n=2, max_new_tokens=4)
    hand = copy.deepcopy(trainer.model).double()
    reference = copy.deepcopy(hand)
    # SGD, because Adam enlarges the rounding of tiny gradients.
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.scheduler = torch.optim.lr_scheduler.LinearLR(trainer.optimizer, 1.0, 0.2, 10)
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 10)
    steps = 0
    with Run(case.block, trainer, rollout, tmp_path).start() as run:
        for _ in range(3):
            sampled = []
            for _ in range(case.batches):
                batch = run.batch(rollout.generate(PROMPTS))
                with torch.no_grad():
                    old, ref, by_hand = run.score(batch), run.reference(batch), scored(hand, batch)
                run.measure(batch, old=old, reference=ref)
                sampled.append((batch, old, ref, rewards_of(batch), by_hand))
            tokens = sum(int(batch.response_mask.sum()) for batch, *_ in sampled)
            for _ in range(case.epochs):
                exact = torch.zeros((), dtype=torch.float64)
                for batch, old, ref, advantages, by_hand in sampled:
                    for first, last in case.micro_batches(len(batch)):
                        rows = slice(first, last)
                        part = batch.rows(first, last) if case.parts > 1 else batch
                        logprobs, mask = run.score(part), part.response_mask
                        policy = logprobs.detach() if case.correction.mode == "bypass" else old[rows]
                        weights = run.correct(part, policy, advantages=advantages[rows, 0]).as_multiplier()
                        loss = case.policy_loss(weights, advantages[rows], logprobs, old[rows], part.rollout_logprobs)
                        run.backward((loss + run.kl(part, logprobs=logprobs, reference=ref[rows]))[mask].sum() / tokens)
                        with torch.no_grad():
                            exact_reference = scored(reference, part)
                        terms = case.by_hand(part, scored(hand, part), by_hand[rows], exact_reference, advantages[rows])
                        exact = exact + terms[mask].sum() / tokens
                stepped = run.step(max_norm=1.0)
                optimizer.zero_grad()
                exact.backward()
                torch.nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
                scheduled = optimizer.param_groups[0]["lr"]
                applied = scheduled * (1.0 if case.period is None else max(0.1, 0.5 ** (steps // case.period)))
                assert stepped.learning_rate == pytest.approx(applied, abs=1e-12)
                optimizer.param_groups[0]["lr"] = applied
                optimizer.step()
                optimizer.param_groups[0]["lr"] = scheduled
                schedule.step()
                steps += 1
            run.send()
            run.log()
            pairs = zip(trainer.model.parameters(), hand.parameters(), strict=True)
            assert max(float((ours.double() - exact_one).abs().max()) for ours, exact_one in pairs) <= 2e-5
            hand.load_state_dict({name: values.double() for name, values in trainer.model.state_dict().items()})
