"""The KL example: its exact optimum, the ranking that it shows, and a page that loads nothing."""

from __future__ import annotations

import io
import itertools
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

from examples.kl_placement import (
    COLOURS,
    LENGTH,
    TOKENS,
    Optimum,
    Result,
    Toy,
    loss_of,
    optimum,
    print_table,
    ranking,
    run,
    settings,
    write_page,
)

BETA = 0.05
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """Tags and whatever a browser would load."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in LOADING]


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


def test_policies_of_other_seeds_are_no_baseline() -> None:
    """The gradient of one seed is the same beside any other."""
    toy = Toy.make()
    config = next(setting.config for setting in settings() if setting.name == "K1 reward, leave-one-out")
    gradients = []
    for other in (toy.ref, 3 * toy.ref):
        logits = torch.stack([toy.ref * 1.5, other]).requires_grad_()
        # Noise is drawn row by row, so the first policy's responses do not depend on the second.
        loss = loss_of(toy, logits, config, BETA, 8, torch.Generator().manual_seed(0))
        gradients.append(torch.autograd.grad(loss, logits)[0][0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_every_estimator_has_every_placement(results: dict[str, Result]) -> None:
    nine = {f"{estimator} {placement}" for estimator in ("K1", "K2", "K3") for placement in ("reward", "loss", "both")}
    assert set(results) == nine | {"K1 reward, leave-one-out", "K1 reward, rewards path", "none"}
    assert set(results) == set(COLOURS) and len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.parametrize(
    "name", ["K1 reward", "K1 reward, leave-one-out", "K1 reward, rewards path", "K1 both", "K3 both"]
)
def test_unbiased_configurations_reach_the_optimum(name: str, results: dict[str, Result], best: Optimum) -> None:
    assert 0 <= best.j - results[name].final_j < 0.01
    assert results[name].final_kl == pytest.approx(best.kl, rel=0.15)


def test_noise_ranks_the_unbiased(results: dict[str, Result]) -> None:
    order = ["K1 reward, rewards path", "K1 reward, leave-one-out", "K1 reward", "K3 both"]
    spread = [results[name].gradient_std for name in order]
    assert spread == sorted(spread) and spread[0] < 1e-6 < 0.01 < spread[1]
    assert results[order[0]].final_j > results[order[1]].final_j + 0.0005
    assert results[order[0]].final_j > results[order[3]].final_j + 0.002


def test_k3_in_the_loss_is_stable_but_elsewhere(results: dict[str, Result], best: Optimum) -> None:
    loss, both = results["K3 loss"], results["K3 both"]
    assert results["none"].final_j + 0.05 < loss.final_j < both.final_j - 0.01
    assert loss.final_kl < 1.5 * best.kl


def test_k1_in_the_loss_regularises_nothing(results: dict[str, Result]) -> None:
    assert results["K1 loss"].final_j == pytest.approx(results["none"].final_j, abs=0.02)
    assert results["K1 loss"].final_kl == pytest.approx(results["none"].final_kl, rel=0.02)


@pytest.mark.parametrize("name", ["K2 reward", "K3 reward", "K1 loss", "none"])
def test_the_kl_runs_away_while_the_reward_rises(name: str, results: dict[str, Result], best: Optimum) -> None:
    assert results[name].final_kl > 1.5 * best.kl
    assert results[name].final_j < results["K3 loss"].final_j - 0.05
    assert results[name].reward[-1].mean() > best.reward


def test_the_sentence_follows_from_the_numbers(best: Optimum) -> None:
    def result(name: str, j: float, kl: float) -> Result:
        values = torch.tensor([[j - 1e-4, j + 1e-4]])
        return Result(
            name=name, placement=None, steps=[1], j=values, reward=values, kl=torch.full((1, 2), kl), gradient_std=0.0
        )

    sentence = ranking([result("a", 0.2, 4 * best.kl), result("b", 0.4, best.kl), result("c", 0.4001, best.kl)], best)
    assert "c 0.400 ≈ b 0.400 > a 0.200" in sentence
    assert sentence.endswith(": a.")
    assert ranking([result("b", 0.4, best.kl)], best).endswith("nobody.")


def test_page_and_table(results: dict[str, Result], best: Optimum, tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    write_page(path, list(results.values()), best, BETA)
    source = path.read_text(encoding="utf-8")
    page = Page(source)
    assert page.links == [] and "link" not in page.tags and "iframe" not in page.tags
    assert source.count("plotly.js v") == 1
    assert '"modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]]' in source
    console = Console(width=120, file=io.StringIO(), record=True)
    print_table(list(results.values()), best, BETA, console)
    text = console.export_text()
    assert all(name in text for name in [*results, "optimum"]) and "…" not in text
