"""The KL example: its exact optimum, which policies reach it, and its table."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from rich.console import Console

from examples.kl_placement import (
    LENGTH,
    TOKENS,
    Optimum,
    Result,
    Toy,
    optimum,
    print_table,
    run,
)

BETA = 0.05


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """One training of every configuration, shorter and with fewer seeds than the example's own."""
    return {result.name: result for result in run(BETA, steps=300, seeds=6)}


@pytest.fixture(scope="module")
def best() -> Optimum:
    return optimum(Toy.make(), BETA)


def test_exact_sums_are_those_of_an_enumeration() -> None:
    toy = Toy.make()
    logits = torch.randn(1, LENGTH, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    table = logits[0].log_softmax(-1)
    tokens = torch.tensor(list(itertools.product(range(TOKENS), repeat=LENGTH)))
    previous = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.long), tokens[:, :-1]], 1)
    position = torch.arange(LENGTH)
    logp = table[position, previous, tokens].sum(1)
    ref = toy.ref[position, previous, tokens].sum(1)
    reward, kl = toy.exact(logits)
    assert logp.exp().sum().item() == pytest.approx(1)
    assert reward.item() == pytest.approx((logp.exp() * toy.reward[position, tokens].sum(1)).sum().item())
    assert kl.item() == pytest.approx((logp.exp() * (logp - ref)).sum().item())


def test_the_optimum_is_one(best: Optimum) -> None:
    assert best.j == pytest.approx(best.reward - BETA * best.kl)
    logits = best.logits[None].clone().requires_grad_()
    reward, kl = Toy.make().exact(logits)
    (gradient,) = torch.autograd.grad((reward - BETA * kl).sum(), logits)
    assert gradient.abs().max().item() < 1e-12


@pytest.mark.parametrize(
    "name", ["k1 reward", "k1 reward, leave-one-out", "k1 reward, rewards path", "k1 both", "k3 both"]
)
def test_unbiased_configurations_reach_the_optimum(name: str, results: dict[str, Result], best: Optimum) -> None:
    assert 0 <= best.j - results[name].j.mean() < 0.01
    assert float(results[name].kl.mean()) == pytest.approx(best.kl, rel=0.15)


def test_k1_in_the_loss_regularizes_nothing(results: dict[str, Result]) -> None:
    assert float(results["k1 loss"].j.mean()) == pytest.approx(float(results["none"].j.mean()), abs=0.02)
    assert float(results["k1 loss"].kl.mean()) == pytest.approx(float(results["none"].kl.mean()), rel=0.02)


def test_the_table_names_every_configuration(results: dict[str, Result], best: Optimum) -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    print_table(list(results.values()), best, "all", console)
    text = console.export_text()
    assert all(name in text for name in [*results, "optimum"]) and "…" not in text
