"""The KL example: its exact optimum, which policies reach it, and its table."""

from __future__ import annotations

import pytest

from examples.kl_placement import (
    Optimum,
    Result,
    Toy,
    optimum,
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


@pytest.mark.parametrize(
    "name", ["k1 reward", "k1 reward, leave-one-out", "k1 reward, rewards path", "k1 both", "k3 both"]
)
def test_unbiased_configurations_reach_the_optimum(name: str, results: dict[str, Result], best: Optimum) -> None:
    assert 0 <= best.j - results[name].j.mean() < 0.01
    assert float(results[name].kl.mean()) == pytest.approx(best.kl, rel=0.15)
