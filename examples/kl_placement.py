"""Where a KL estimate goes decides what it regularises: every placement on a toy whose optimum is known exactly.

    python -m examples.kl_placement

The toy is of the kind of A Comedy of Estimators (arXiv 2512.21852): a tabular autoregressive policy, one row of logits
for each position and previous token, and a reward that is the fraction of positions with a target token. Such a policy
is a Markov chain, so that E[R], KL(pi||ref) and the objective J = E[R] - beta KL are exact sums, and soft dynamic
programming gives the policy that maximises J. Every configuration trains by REINFORCE with a leave-one-out baseline on
the plain reward, plus the term of `mismatch_ext.kl_terms` without a baseline. Two variants of K1 in the reward
show what a baseline is worth: "leave-one-out" gives the surrogate one, as shipped, and "rewards path" subtracts
the term's reward from the plain reward before the one baseline.

What to expect, and where this toy departs from a textbook ranking:

- K1 in the reward, K1 in both and K3 in both have the gradient of the KL itself. Among them only noise decides, and
  with the same credit and no baseline it decides little: K3 both ends level with K1 in the reward or a shade below.
  Both end below the rewards path, whose noise vanishes at the optimum: R - beta K1 is the same there for every
  response, so that the noise of the reward and that of K1 cancel. With any other estimator they do not.
- K1 in the loss has expected gradient zero, so it trains as if there were no KL term at all.
- K2 in the loss does as well as the unbiased ones. It credits no KL to earlier tokens, which matters little here.
- K3 in the loss is the gradient of the forward divergence of tokens, KL(ref||pi): stable, but towards another optimum. It is
  verl's default and was TRL's up to 1.9; TRL's since then has the gradient of K2 in the loss (docs/kl.md).
- K2 and K3 in the reward lose their grip: the KL runs away. The reward rises meanwhile, because leaving the reference
  is just what pays here. That is lost regularisation; a fall of the reward, as language models can show, is not to be
  had from this toy.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from mismatch_ext import MismatchConfig, kl_terms

TOKENS, LENGTH, BATCH, LEARNING_RATE = 4, 8, 32, 0.05
# The spread of the gradient is measured over this many batches.
REPLICAS = 256
# A KL this many times the optimum's counts as having run away.
RUNAWAY = 1.5
# Differences of J below this do not count for the ranking, however small their standard error.
TIE = 0.001


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A reference policy and a reward.

    Args:
        ref: log-probabilities of the reference, by position, previous token and token `[T, V, V]`.
        reward: Reward of each token at each position `[T, V]`.
    """

    ref: Tensor
    reward: Tensor

    @classmethod
    def make(cls) -> Toy:
        """Draw the one toy that every configuration and seed trains on."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(LENGTH, TOKENS, TOKENS, generator=generator)
        target = torch.randint(0, TOKENS, (LENGTH,), generator=generator)
        reward = torch.nn.functional.one_hot(target, TOKENS) / LENGTH
        return cls(ref=logits.double().log_softmax(-1), reward=reward.double())

    def exact(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return E[R] and KL(pi||ref) of whole responses for policies `[S, T, V, V]`, each `[S]`."""
        logp = logits.log_softmax(-1)
        marginal = torch.zeros(len(logits), TOKENS, dtype=logp.dtype)
        marginal[:, 0] = 1
        reward, kl = torch.zeros_like(marginal[:, 0]), torch.zeros_like(marginal[:, 0])
        for t in range(LENGTH):
            joint = marginal[:, :, None] * logp[:, t].exp()
            kl += (joint * (logp[:, t] - self.ref[t])).sum((1, 2))
            marginal = joint.sum(1)
            reward += marginal @ self.reward[t]
        return reward, kl

    def sample(self, logits: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw responses of each policy `[S, T, V, V]`: log pi and log ref `[S, batch, T]`, reward `[S, batch]`."""
        table = logits.log_softmax(-1)
        policy = torch.arange(len(table))[:, None]
        token = torch.zeros(len(table), batch, dtype=torch.long)
        reward = torch.zeros(len(table), batch, dtype=table.dtype)
        logp, ref = [], []
        for t in range(LENGTH):
            row = table[policy, t, token]
            drawn = torch.multinomial(row.detach().exp().flatten(0, 1), 1, generator=generator).view_as(token)
            logp.append(row.gather(2, drawn[..., None])[..., 0])
            ref.append(self.ref[t, token, drawn])
            reward += self.reward[t, drawn]
            token = drawn
        return torch.stack(logp, -1), torch.stack(ref, -1), reward


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best that any policy can do.

    Args:
        j: E[R] - beta KL.
        reward: E[R].
        kl: KL to the reference, nats per response.
        logits: The policy `[T, V, V]`.
    """

    j: float
    reward: float
    kl: float
    logits: Tensor


def optimum(toy: Toy, beta: float) -> Optimum:
    """Return the policy that maximises E[R] - beta KL, by soft dynamic programming from the last token back."""
    value = torch.zeros(TOKENS, dtype=toy.ref.dtype)
    rows = []
    for t in reversed(range(LENGTH)):
        rows.append(toy.ref[t] + (toy.reward[t] + value) / beta)
        value = beta * rows[-1].logsumexp(-1)
    logits = torch.stack(rows[::-1])
    reward, kl = toy.exact(logits[None])
    return Optimum(j=float(value[0]), reward=float(reward), kl=float(kl), logits=logits)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One configuration; `config` is None for no KL term."""

    name: str
    config: Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one configuration did, exact at each recorded step.

    Args:
        name: Estimator and placement.
        placement: `reward`, `loss`, `both`, or None without a KL term.
        steps: Optimizer steps after which the rest was recorded `[N]`.
        j: E[R] - beta KL of every seed `[N, S]`.
        reward: E[R] `[N, S]`.
        kl: KL to the reference, nats per response `[N, S]`.
        gradient_std: Spread of one batch's gradient at the optimum: root of the summed variances of all logits.
    """

    name: str
    placement: str | None
    steps: list[int]
    j: Tensor
    reward: Tensor
    kl: Tensor
    gradient_std: float

    @property
    def final_j(self) -> float:
        """Mean over seeds of J after the last step."""
        return float(self.j[-1].mean())

    @property
    def final_kl(self) -> float:
        """Mean over seeds of the KL after the last step."""
        return float(self.kl[-1].mean())


def settings() -> list[Setting]:
    """Return every estimator at every placement, two variants of K1 in the reward, and no KL term."""

    def config(estimator: str, placement: str, *, baseline: str = "none", path: str = "surrogate") -> Any:
        # Name every field, so that a change of defaults does not change what is compared here.
        section = {
            "estimator": estimator,
            "placement": placement,
            "target": "sequence",
            "ratio": "none",
            "coef": None,
            "reward_path": path,
            "baseline": baseline,
            "target_kl": None,
        }
        return MismatchConfig.parse({"kl": section}).kl

    found = [
        Setting(name=f"{estimator.upper()} {placement}", config=config(estimator, placement))
        for estimator in ("k1", "k2", "k3")
        for placement in ("reward", "loss", "both")
    ]
    variants = [
        Setting(name="K1 reward, leave-one-out", config=config("k1", "reward", baseline="leave_one_out")),
        Setting(name="K1 reward, rewards path", config=config("k1", "reward", path="rewards")),
    ]
    return [found[0], *variants, *found[1:], Setting(name="none", config=None)]


def loss_of(toy: Toy, logits: Tensor, config: Any, beta: float, batch: int, generator: torch.Generator) -> Tensor:
    """Sample responses of every policy and return the sum of their losses, whose gradient estimates that of -J."""
    logp, ref, reward = toy.sample(logits, batch, generator)
    terms = torch.zeros_like(logp)
    if config is not None:
        pair = logp.flatten(0, 1), ref.flatten(0, 1)
        mask = torch.ones_like(pair[1], dtype=torch.bool)
        # Rows of other policies must not enter the baseline.
        groups = torch.arange(len(logits)).repeat_interleave(batch)
        loss, penalty = kl_terms(*pair, mask, config, coef=beta, groups=groups)
        terms, reward = loss.view_as(logp), reward - penalty.view_as(logp).sum(-1)
    # The distance to the mean of the others.
    advantage = (reward - reward.mean(1, keepdim=True)) * batch / (batch - 1)
    return (terms - advantage[..., None] * logp).sum() / batch


def gradient_std(toy: Toy, policy: Tensor, config: Any, beta: float) -> float:
    """Return the spread of the gradient of one batch, the policy `[T, V, V]` held fixed."""
    logits = policy.repeat(REPLICAS, 1, 1, 1).requires_grad_()
    loss = loss_of(toy, logits, config, beta, BATCH, torch.Generator().manual_seed(2))
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(gradient.var(0).sum().sqrt())


def train(toy: Toy, setting: Setting, best: Optimum, beta: float, steps: int, seeds: int, bar: tqdm[None]) -> Result:
    """Train one policy per seed with one configuration, all of them in parallel."""
    logits = toy.ref.repeat(seeds, 1, 1, 1).requires_grad_()
    adam = torch.optim.Adam([logits], LEARNING_RATE)
    generator = torch.Generator().manual_seed(1)
    every = max(1, steps // 60)
    recorded, rewards, kls = [], [], []
    for step in range(1, steps + 1):
        adam.zero_grad()
        loss_of(toy, logits, setting.config, beta, BATCH, generator).backward()  # type: ignore[no-untyped-call]
        adam.step()
        bar.update()
        if step in (1, steps) or step % every == 0:
            reward, kl = toy.exact(logits.detach())
            recorded.append(step)
            rewards.append(reward)
            kls.append(kl)
    reward, kl = torch.stack(rewards), torch.stack(kls)
    return Result(
        name=setting.name,
        placement=setting.config.placement if setting.config else None,
        steps=recorded,
        j=reward - beta * kl,
        reward=reward,
        kl=kl,
        gradient_std=gradient_std(toy, best.logits, setting.config, beta),
    )


def run(beta: float = 0.05, steps: int = 600, seeds: int = 16, progress: bool = False) -> list[Result]:
    """Train every configuration.

    Args:
        beta: Coefficient of the KL, above 0.
        steps: Optimizer steps.
        seeds: Independent policies per configuration, at least 2.
        progress: Whether to draw a progress bar.

    Returns:
        Results in the order of `settings`.
    """
    toy = Toy.make()
    best = optimum(toy, beta)
    chosen = settings()
    with tqdm(total=len(chosen) * steps, unit="step", disable=not progress) as bar:
        results = []
        for setting in chosen:
            bar.set_description(setting.name)
            results.append(train(toy, setting, best, beta, steps, seeds, bar))
    return results


def ranking(results: list[Result], best: Optimum) -> str:
    """Say in a sentence how the run ranked the configurations, and whose KL ran away."""
    ordered = sorted(results, key=lambda result: -result.final_j)
    words = [f"{ordered[0].name} {ordered[0].final_j:.3f}"]
    for better, worse in pairwise(ordered):
        error = math.sqrt(sum(float(result.j[-1].var()) / result.j.shape[1] for result in (better, worse)))
        tied = better.final_j - worse.final_j < max(TIE, 2 * error)
        words.append(f"{'≈' if tied else '>'} {worse.name} {worse.final_j:.3f}")
    away = [result.name for result in ordered if result.final_kl > RUNAWAY * best.kl]
    kept = f"more than {RUNAWAY} times the optimum's KL of {best.kl:.2f}: {'; '.join(away) if away else 'nobody'}"
    return f"By final J, with {best.j:.3f} the most there is: {' '.join(words)}; {kept}."


def print_table(results: list[Result], best: Optimum, beta: float, console: Console) -> None:
    """Print one row per configuration and one for the optimum."""
    table = Table(
        title=f"KL placement at beta {beta:g}, after {results[0].steps[-1]} steps",
        caption=f"mean ± std over {results[0].j.shape[1]} seeds; gradient std: of one batch, at the optimum",
    )
    for heading in ("configuration", "J", "below optimum", "E[R]", "KL to reference", "gradient std"):
        table.add_column(heading, justify="left" if heading == "configuration" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            _mean_std(result.j),
            f"{best.j - result.final_j:.3f}",
            _mean_std(result.reward),
            _mean_std(result.kl, 2),
            f"{result.gradient_std:.4f}",
            end_section=result is results[-1],
        )
    table.add_row("optimum", f"{best.j:.3f}", "", f"{best.reward:.3f}", f"{best.kl:.2f}", "")
    console.print(table)


def main() -> None:
    """Train every configuration, and print the table and the ranking."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beta", type=float, default=0.05, help="coefficient of the KL (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=16, help="policies per configuration (default: %(default)s)")
    args = parser.parse_args()
    if not (0 < args.beta < math.inf and args.steps >= 1 and args.seeds >= 2):
        parser.error("--beta must be above 0, --steps at least 1, --seeds at least 2")
    # Tensors this small are slower on several threads.
    torch.set_num_threads(1)
    console = Console(width=120)
    results = run(args.beta, args.steps, args.seeds, progress=True)
    best = optimum(Toy.make(), args.beta)
    print_table(results, best, args.beta, console)
    console.print(ranking(results, best), highlight=False)


def _mean_std(values: Tensor, digits: int = 3) -> str:
    return f"{values[-1].mean():.{digits}f} ± {values[-1].std():.{digits}f}"


if __name__ == "__main__":
    main()
