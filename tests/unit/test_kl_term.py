"""The KL term of a run: one coefficient a batch, the policy that a ratio is to, sums over ranks, and its saved state."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import KlTerm, kl_full_surrogate, kl_penalty, kl_surrogate
from mismatch_ext.ranks import ONE_PROCESS

LED = KlConfig(coef=0.1, target_kl=1e-3)
# As a run wrote it before this class was: TRL's checkpoints and verl's alike.
SAVED = '{"version": 1, "initial": 0.1, "coef": 0.09704455335485082, "integral": -0.01, "steps": 1}'


def batch(seed: int = 0, rows: int = 4, length: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs and ref_logprobs, float32, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -1 - torch.rand(rows, length, generator=generator)
    ref = logprobs - 0.3 * torch.randn(rows, length, generator=generator)
    return logprobs, ref, (torch.rand(rows, length, generator=generator) < 0.7).long()


class Halves:
    """The first of two ranks, which knows what the second one's tensors are."""

    rank, size = 0, 2

    def __init__(self, other: Tensor) -> None:
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def sum(self, values: Tensor) -> Tensor:
        return values + self.other


class Sent:
    """Keeps what a rank would have summed."""

    rank, size = 1, 2

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def sum(self, values: Tensor) -> Tensor:
        self.values = values
        return values


def adapt(term: KlTerm, old: Tensor, ref: Tensor, mask: Tensor, ranks: Any = ONE_PROCESS) -> dict[str, float]:
    """Let a batch of log-probabilities lead the coefficient."""
    return term.adapt_to(ranks.sum(term.sums(old, ref, mask)).tolist())


def test_a_batch_has_one_coefficient_and_its_kl_counts_from_the_next() -> None:
    term, (old, ref, mask) = KlTerm(LED, 0.1), batch()
    found = []
    for _ in range(3):
        term.begin()
        before = term.penalty(old, ref, mask)
        adapt(term, old, ref, mask)
        # The rewards, the log and the loss of the batch: the same coefficient before and after it is measured.
        torch.testing.assert_close(before, term.penalty(old, ref, mask), rtol=0, atol=0)
        loss = term.loss(old, ref, mask)
        torch.testing.assert_close(loss, kl_surrogate(old, ref, mask, LED, coef=term.coef), rtol=0, atol=0)
        found.append(term.coef)
    # Errors at their clip of +-0.2, of either sign.
    k1 = float((old.double() - ref.double())[mask.bool()].mean())
    error = math.copysign(0.2, k1 / 1e-3 - 1)
    assert found == pytest.approx([0.1, 0.1 * math.exp(0.15 * error), 0.1 * math.exp(0.2 * error)])


def test_the_kl_is_that_of_the_tokens_of_all_ranks() -> None:
    old, ref, mask = batch()
    whole = KlTerm(LED, 0.1)
    expected = adapt(whole, old, ref, mask)
    d = (old.double() - ref.double())[mask.bool()]
    assert expected["kl_ref_k1"] == pytest.approx(float(d.mean()), abs=1e-7)
    assert expected["kl_ref_k3"] == pytest.approx(float((torch.exp(-d) - 1 + d).mean()), abs=1e-7)
    second, first = Sent(), KlTerm(LED, 0.1)
    KlTerm(LED, 0.1).measure(old[1:], ref[1:], mask[1:], second)
    # The first rank has one row and the second three; also where the first has none.
    assert adapt(first, old[:1], ref[:1], mask[:1], Halves(second.values)) == pytest.approx(expected)
    assert first.controller.coef == pytest.approx(whole.controller.coef, rel=1e-12)
    nothing = KlTerm(LED, 0.1).measure(old, ref, mask * 0, Halves(second.values))
    assert nothing == pytest.approx(KlTerm(LED, 0.1).measure(old[1:], ref[1:], mask[1:]))


def test_a_batch_without_tokens_leaves_the_coefficient() -> None:
    term, (old, ref, mask) = KlTerm(LED, 0.1), batch()
    assert adapt(term, old, ref, mask * 0) == {"kl_ref_k1": 0.0, "kl_ref_k3": 0.0, "kl_coef": 0.1}
    assert term.controller.state.steps == 0


@pytest.mark.parametrize("given", [("rollout", "old"), ("rollout",), ("old",), ()], ids="-".join)
def test_a_ratio_is_to_the_rollout_else_to_the_old_policy_else_to_none(given: tuple[str, ...]) -> None:
    config = KlConfig(estimator="k1", ratio="token", coef=0.5)
    logprobs, ref, mask = batch()
    policies = {"rollout": logprobs + 0.2, "old": logprobs - 0.1}
    found = KlTerm(config, 0.5).loss(logprobs, ref, mask, **{f"{name}_logprobs": policies[name] for name in given})
    behavior = policies[given[0]] if given else logprobs
    torch.testing.assert_close(found, kl_surrogate(logprobs, ref, mask, config, behavior_logprobs=behavior))
    for other in (*policies.values(), logprobs):
        apart = found - kl_surrogate(logprobs, ref, mask, config, behavior_logprobs=other)
        assert other is behavior or float(apart.abs().max()) > 1e-3


def test_what_is_in_the_rewards_is_not_in_the_loss() -> None:
    logprobs, ref, mask = batch()
    for placement, shared in (("reward", 0.0), ("both", 1.0)):
        config = KlConfig(estimator="k3", placement=placement, reward_path="rewards", coef=0.5)  # type: ignore[arg-type]
        term = KlTerm(config, 0.5)
        expected = kl_penalty(logprobs, ref, mask, config, coef=0.5)
        torch.testing.assert_close(term.penalty(logprobs, ref, mask), expected.reward, rtol=0, atol=0)
        torch.testing.assert_close(term.loss(logprobs, ref, mask), shared * expected.reward)
        assert float(expected.reward.sum()) > 0.01
        assert config.in_rewards and config.in_loss == (placement == "both") and not config.has_baseline


def test_full_is_computed_from_logits_and_from_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    logprobs, mask = policy.log_softmax(-1)[..., 0], torch.ones(2, 3)
    config = KlConfig(estimator="full", coef=0.5)
    term = KlTerm(config, 0.5)
    found = term.loss(logprobs, None, mask, logits=lambda: (policy, reference), temperature=0.7)
    expected = kl_full_surrogate(policy, reference, logprobs, mask, config, temperature=0.7)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="'full' needs the logits"):
        term.loss(logprobs, logprobs, mask)
    with pytest.raises(ConfigError, match="'full'.*baseline"):
        term.loss(logprobs, None, mask, logits=lambda: (policy, reference), baseline=mask)
    with pytest.raises(ConfigError, match="'k1' needs log-probabilities under the reference"):
        KlTerm(replace(config, estimator="k1"), 0.5).loss(logprobs, None, mask)


def test_a_state_that_is_already_saved_is_gone_on_from() -> None:
    old, ref, mask = batch()
    led = KlTerm(LED, 0.1)
    assert led.load_state_dict(json.loads(SAVED)) is None
    assert led.coef == 0.09704455335485082 and led.state_dict() == json.loads(SAVED)
    # In the middle of a batch as between two: the coefficient is the one that was saved.
    adapt(led, old, ref, mask)
    state = json.loads(json.dumps(led.state_dict()))
    other = KlTerm(LED, 0.1)
    adapt(other, ref, old, mask)
    other.load_state_dict(state)
    assert other.coef == state["coef"] != led.coef


def test_a_training_that_begins_anew_has_the_first_coefficient() -> None:
    old, ref, mask = batch()
    term = KlTerm(LED, 0.1)
    for _ in range(2):
        adapt(term, old, ref, mask)
    assert term.coef != 0.1
    term.reset()
    assert term.coef == 0.1 and term.controller.state.steps == 0


@pytest.mark.parametrize(
    ("config", "in_rewards", "in_loss", "has_baseline"),
    [
        (KlConfig(), False, True, True),
        (KlConfig(estimator="k3"), False, True, True),
        (KlConfig(estimator="k2"), False, True, False),
        (KlConfig(baseline="none"), False, True, False),
        (KlConfig(reward_path="rewards"), True, False, False),
        (KlConfig(estimator="k3", reward_path="rewards"), True, True, False),
    ],
)
def test_where_a_section_puts_its_parts(config: KlConfig, in_rewards: bool, in_loss: bool, has_baseline: bool) -> None:
    assert (config.in_rewards, config.in_loss, config.has_baseline) == (in_rewards, in_loss, has_baseline)
