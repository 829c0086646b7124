"""Where a KL estimate goes decides what it regularizes: every placement on a toy whose optimum is known exactly.

    python -m examples.kl_placement

The toy is of the kind of A Comedy of Estimators (arXiv 2512.21852): a tabular autoregressive policy, one row of logits for each
position and previous token, and a reward that is the fraction of positions with a target token. Such a policy is a Markov chain,
so E[R], KL(pi||ref) and the objective J = E[R] - beta KL are exact sums, and soft dynamic programming gives the policy that
maximizes J. Every configuration trains by REINFORCE with a leave-one-out baseline on the plain reward, plus the term of
`mismatch_ext.kl_terms` without a baseline. Two variants of k1 in the reward show what a baseline is worth: "leave-one-out" gives
the surrogate one, as shipped, and "rewards path" subtracts the term's reward from the plain reward before the one baseline.
"none" is the control without a KL term. No engine is involved, and pi samples for itself.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from mismatch_ext import MismatchConfig, kl_terms

TOKENS, LENGTH, BATCH, LEARNING_RATE, BETA = 4, 8, 32, 0.05, 0.05


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A reference policy and a reward.

    Args:
        ref: Log-probabilities of the reference, by position, previous token and token `[T, V, V]`.
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
    """The best that any policy can do: J, E[R], the KL in nats per response, and the policy's logits `[T, V, V]`."""

    j: float
    reward: float
    kl: float
    logits: Tensor


def optimum(toy: Toy, beta: float) -> Optimum:
    """Return the policy that maximizes E[R] - beta KL, by soft dynamic programming from the last token back."""
    value = torch.zeros(TOKENS, dtype=toy.ref.dtype)
    rows = []
    for t in reversed(range(LENGTH)):
        rows.append(toy.ref[t] + (toy.reward[t] + value) / beta)
        value = beta * rows[-1].logsumexp(-1)
    logits = torch.stack(rows[::-1])
    reward, kl = toy.exact(logits[None])
    return Optimum(j=float(value[0]), reward=float(reward), kl=float(kl), logits=logits)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one configuration reached, exact, by seed `[S]`.

    Args:
        name: Estimator and placement.
        j: E[R] - beta KL.
        reward: E[R].
        kl: KL to the reference, nats per response.
    """

    name: str
    j: Tensor
    reward: Tensor
    kl: Tensor


def settings() -> dict[str, Any]:
    """Return every estimator at every placement, two variants of k1 in the reward, and no KL term, by name."""

    def config(estimator: str, placement: str, *, baseline: str = "none", path: str = "surrogate") -> Any:
        # Every field is named, so that a change of defaults does not change what is compared here.
        section = {
            "estimator": estimator, "placement": placement, "target": "sequence", "ratio": "none", "coef": None,
            "reward_path": path, "baseline": baseline, "target_kl": None,
        }  # fmt: skip
        return MismatchConfig.parse({"kl": section}).kl

    return {
        "k1 reward": config("k1", "reward"),
        "k1 reward, leave-one-out": config("k1", "reward", baseline="leave_one_out"),
        "k1 reward, rewards path": config("k1", "reward", path="rewards"),
        "k1 loss": config("k1", "loss"),
        "k1 both": config("k1", "both"),
        **{f"{k} {placement}": config(k, placement) for k in ("k2", "k3") for placement in ("reward", "loss", "both")},
        "none": None,
    }


def loss_of(toy: Toy, logits: Tensor, config: Any, beta: float, generator: torch.Generator) -> Tensor:
    """Sample responses of every policy and return the sum of their losses, whose gradient estimates that of -J."""
    logp, ref, reward = toy.sample(logits, BATCH, generator)
    terms = torch.zeros_like(logp)
    if config is not None:
        logprobs, ref_logprobs = logp.flatten(0, 1), ref.flatten(0, 1)
        # Rows of other policies must not enter the baseline.
        groups = torch.arange(len(logits)).repeat_interleave(BATCH)
        mask = torch.ones_like(ref_logprobs, dtype=torch.bool)
        loss, penalty = kl_terms(
            logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask, settings=config, coef=beta, groups=groups
        )
        terms, reward = loss.view_as(logp), reward - penalty.view_as(logp).sum(-1)
    advantage = (reward - reward.mean(1, keepdim=True)) * BATCH / (BATCH - 1)  # the distance to the mean of the others
    return (terms - advantage[..., None] * logp).sum() / BATCH


def run(beta: float = BETA, steps: int = 600, seeds: int = 16) -> list[Result]:
    """Train one policy per seed with every configuration, those of a configuration in parallel, and return what each reached."""
    toy, results = Toy.make(), []
    for name, config in tqdm(settings().items(), unit="configuration"):
        logits = toy.ref.repeat(seeds, 1, 1, 1).requires_grad_()
        adam = torch.optim.Adam([logits], LEARNING_RATE)
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            adam.zero_grad()
            loss_of(toy, logits, config, beta, generator).backward()  # type: ignore[no-untyped-call]
            adam.step()
        reward, kl = toy.exact(logits.detach())
        results.append(Result(name=name, j=reward - beta * kl, reward=reward, kl=kl))
    return results


def print_table(results: list[Result], best: Optimum, title: str, console: Console) -> None:
    """Print one row per configuration, the best first, and one for the optimum."""
    seeds = len(results[0].j)
    table = Table(title=title, caption=f"mean ± std over {seeds} seeds")
    for heading in ("configuration", "J", "below optimum", "E[R]", "KL to reference"):
        table.add_column(heading, justify="left" if heading == "configuration" else "right", no_wrap=True)

    def level(values: Tensor, digits: int = 3) -> str:
        return f"{values.mean():.{digits}f} ± {values.std():.{digits}f}"

    for result in sorted(results, key=lambda result: -float(result.j.mean())):
        below = f"{best.j - float(result.j.mean()):.3f}"
        table.add_row(result.name, level(result.j), below, level(result.reward), level(result.kl, 2))
    table.add_section()
    table.add_row("optimum", f"{best.j:.3f}", "", f"{best.reward:.3f}", f"{best.kl:.2f}")
    console.print(table)


def main() -> None:
    """Train every configuration, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beta", type=float, default=BETA, help="coefficient of the KL (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=16, help="policies per configuration (default: %(default)s)")
    args = parser.parse_args()
    if not (0 < args.beta < math.inf and args.steps >= 1 and args.seeds >= 2):
        parser.error("--beta must be above 0, --steps at least 1, --seeds at least 2")
    torch.set_num_threads(1)  # tensors this small are slower on several threads
    title = f"KL placement at beta {args.beta:g}, after {args.steps} steps"
    print_table(run(args.beta, args.steps, args.seeds), optimum(Toy.make(), args.beta), title, Console(width=120))


if __name__ == "__main__":
    main()
