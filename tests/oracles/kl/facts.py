"""What is documented about every KL configuration; the tests hold each line against exact enumeration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mismatch_ext.config import ESTIMATORS, KlConfig
from mismatch_ext.testing import Problem, exact

PLACEMENTS = ("loss", "reward", "both")
TARGETS = ("token", "sequence")
SAMPLINGS = ("on-policy", "none", "token", "sequence")
"""On-policy, or samples of another policy with that importance ratio."""

# (target, sampling): the (estimator, placement) whose expected gradient is exactly that of the target's KL(pi||ref).
_TOKEN = frozenset({("k1", "reward"), ("k1", "both"), ("k2", "loss"), ("k3", "both")})
_SEQUENCE = frozenset({("k1", "reward"), ("k1", "both"), ("k3", "both")})
UNBIASED: dict[tuple[str, str], frozenset[tuple[str, str]]] = {
    ("token", "on-policy"): _TOKEN,
    ("token", "token"): _TOKEN,
    ("token", "sequence"): _TOKEN,
    ("sequence", "on-policy"): _SEQUENCE,
    ("sequence", "sequence"): _SEQUENCE,
    ("token", "none"): frozenset(),
    ("sequence", "none"): frozenset(),
    ("sequence", "token"): frozenset(),
}
UNBIASED_VALUES = frozenset({"k1", "k3"})
"""Estimators whose mean over the policy is KL(pi||ref)."""

FULL_UNBIASED: dict[tuple[str, str], frozenset[str]] = {
    (target, sampling): frozenset({"loss", "both"})
    if target == "token"
    else frozenset({"both"} if sampling in ("on-policy", "sequence") else set())
    for target in TARGETS
    for sampling in SAMPLINGS
}
"""(target, sampling): placements of the estimator "full" whose expected gradient is that of the target's KL(pi||ref). It needs
no sample of token t, so that for target "token" prefixes are all that is sampled."""
FULL_CLAIMS = {
    "loss": "KL(pi||ref) of tokens, prefixes of pi",
    "reward": "KL(pi||ref) of responses minus KL(pi||ref) of tokens, prefixes of pi",
}
"""What estimator "full" regularizes on-policy in the placements that are biased for target "sequence"."""

PATHWISE: dict[str, str | None] = {"k1": None, "k2": "KL(pi||ref)", "k3": "KL(ref||pi)", "abs": "2 TV"}
"""Placement "loss": the divergence of next-token distributions whose gradient is the estimator's own, on average."""
MEAN = {"k1": "KL(pi||ref)", "k2": "E[k2]", "k3": "KL(pi||ref)", "abs": "E[abs]"}
"""Placement "both": the divergence of the target whose gradient it is."""

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
    "abs": torch.abs,
}
"""Textbook forms of the estimators, against which ours are held."""


def stale_gradient(problem: Problem, estimate: Callable[[Tensor], Tensor], part: str, *, drawn: bool) -> Tensor:
    """Return what is regularized when samples of mu stand in for samples of pi, as a gradient `[P, V]`.

    "loss" is the gradient of E_mu[sum K], mu fixed. "reward" and "own reward" are sums over t of the gradient of
    E[sg(K of t, or of t and later)]: prefix and later tokens come from mu, token t from pi (`drawn`), or from mu as well
    and is merely scored.

    Args:
        problem: Policies.
        estimate: K as a function of the log-ratio d.
        part: "loss", "reward" (K of token t and later ones) or "own reward" (K of token t).
        drawn: Whether token t follows pi, as a ratio of the token has it; read for the rewards only.
    """
    tree, policy = problem.tree, problem.policy.clone().requires_grad_()
    p, m = tree.logprobs(policy), tree.logprobs(problem.behavior)
    sampled, kl = m.sum(1).exp(), estimate(p - tree.logprobs(problem.reference))
    if part == "loss":
        return torch.autograd.grad(sampled @ kl.sum(1), policy)[0]
    credit = kl.detach().flip(1).cumsum(1).flip(1) if part == "reward" else kl.detach()
    weighted = (m.sum(1, keepdim=True) - m + p).exp() if drawn else sampled[:, None] * p
    return torch.autograd.grad((weighted * credit).sum(), policy)[0]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What one configuration does on average.

    Args:
        estimator: One of `ESTIMATORS`.
        placement: One of `PLACEMENTS`.
        target: One of `TARGETS`.
        sampling: One of `SAMPLINGS`.
    """

    estimator: str
    placement: Literal["loss", "reward", "both"]
    target: Literal["token", "sequence"]
    sampling: Literal["on-policy", "none", "token", "sequence"]

    @property
    def config(self) -> KlConfig:
        """The configuration, with coefficient 1 and no baseline."""
        return KlConfig(
            estimator=self.estimator,  # type: ignore[arg-type]
            placement=self.placement,
            target=self.target,
            ratio="none" if self.sampling == "on-policy" else self.sampling,
            baseline="none",
            coef=1.0,
        )

    @property
    def unbiased(self) -> bool:
        """Whether the expected gradient is documented to be that of the target's KL(pi||ref)."""
        return (self.estimator, self.placement) in UNBIASED[self.target, self.sampling]

    @property
    def unbiased_value(self) -> bool:
        """Whether the expected value is documented to be the target's KL(pi||ref)."""
        weighted = {"token": ("on-policy", "token", "sequence"), "sequence": ("on-policy", "sequence")}
        return self.estimator in UNBIASED_VALUES and self.sampling in weighted[self.target]

    @property
    def prefixes(self) -> Literal["pi", "mu"]:
        """Policy whose prefixes the target "token", and every path-wise part, is averaged over."""
        return "mu" if self.sampling in ("none", "token") else "pi"

    @property
    def claim(self) -> str:
        """The divergence whose gradient this configuration has on average, in words."""
        where = f"tokens, prefixes of {self.prefixes}"
        of = where if self.target == "token" else "responses"
        own = PATHWISE[self.estimator]
        own_text = "0" if own is None else f"{own} of {where}"
        if self.sampling == "none":
            return "none: samples of mu taken for samples of pi"
        if self.placement == "loss":
            return own_text
        if (self.sampling, self.target) == ("token", "sequence"):
            return "none: later tokens are those of mu"
        mean = f"{MEAN[self.estimator]} of {of}"
        if self.placement == "both" or own is None:
            return mean
        return "0" if mean == own_text else f"{mean} minus {own_text}"

    def truth(self, problem: Problem) -> tuple[float, Tensor]:
        """Return value and gradient of the KL(pi||ref) that the configuration is meant to have."""
        return exact(problem, "KL(pi||ref)", self.target, self.prefixes)

    def documented_gradient(self, problem: Problem) -> Tensor:
        """Return the expected gradient as documented, from exact divergences and not from any sampled term."""
        path, score = self._pathwise(problem), self._score(problem)
        return {"loss": path, "reward": score, "both": path + score}[self.placement]

    def _pathwise(self, problem: Problem) -> Tensor:
        if self.sampling == "none":
            return stale_gradient(problem, PLAIN[self.estimator], "loss", drawn=False)
        own = PATHWISE[self.estimator]
        return torch.zeros_like(problem.policy) if own is None else exact(problem, own, "token", self.prefixes)[1]

    def _score(self, problem: Problem) -> Tensor:
        if self.sampling == "none":
            part = "reward" if self.target == "sequence" else "own reward"
            return stale_gradient(problem, PLAIN[self.estimator], part, drawn=False)
        if (self.sampling, self.target) == ("token", "sequence"):
            return stale_gradient(problem, PLAIN[self.estimator], "reward", drawn=True)
        return exact(problem, MEAN[self.estimator], self.target, self.prefixes)[1] - self._pathwise(problem)


FACTS = tuple(
    Fact(estimator=estimator, placement=placement, target=target, sampling=sampling)  # type: ignore[arg-type]
    for sampling in SAMPLINGS
    for target in TARGETS
    for estimator in ESTIMATORS
    for placement in PLACEMENTS
)
