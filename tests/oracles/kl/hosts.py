"""TRL's and verl's own KL terms against exact enumeration: how they are measured, and what was found.

The figures are in `hosts.json`, which `python -m tests.kl_hosts` writes from the hosts' own code, one process per version.
Nothing of a host is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tests.oracles.kl.enumeration import PREFIX_DIVERGENCES, Moments, Problem, Term, exact

RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprobs, ref_logprobs, behavior_logprobs) of one response, each [1, T] -> its KL term at coefficient 1, summed, 0-d."""

Sampling = Literal["on-policy", "off-policy"]
SAMPLINGS: tuple[Sampling, ...] = ("on-policy", "off-policy")
FILE = Path(__file__).with_name("hosts.json")
ZERO = 1e-9
"""Relative size below which a figure is rounding."""


@dataclass(frozen=True, kw_only=True)
class HostTerm:
    """What a host's own KL term does on average.

    Args:
        host: "TRL" or "verl".
        version: Its version.
        setting: What was set besides the coefficient; empty for nothing.
        default: Whether the KL term is the one that the host's defaults give once it is switched on.
        sampling: "on-policy" or "off-policy".
        value: Relative bias of the expected value against KL(pi||ref) of responses.
        responses: Relative bias of the expected gradient against that of KL(pi||ref) of responses.
        cos: Cosine of the two gradients; None where the expected gradient is 0.
        tokens: Relative bias of the expected gradient against that of the per-token reverse KL of the sampled prefixes.
        std: Spread of one response's gradient over the norm of that of KL(pi||ref) of responses.
        regularises: The divergence whose gradient it is, in words; empty when it is none of those enumerated.
    """

    host: str
    version: str
    setting: str
    default: bool
    sampling: Sampling
    value: float
    responses: float
    cos: float | None
    tokens: float
    std: float
    regularises: str

    @property
    def name(self) -> tuple[str, str, str, str]:
        """Host, version, setting and sampling."""
        return self.host, self.version, self.setting, self.sampling


def problem_of(sampling: Sampling) -> Problem:
    """Return the policy that the page's tables are of: vocabulary 3, five tokens."""
    return Problem.random(3, 5, 0, distance=0.7, lag=0.0 if sampling == "on-policy" else 0.3)


def row_term(loss: RowLoss) -> Term:
    """Return a host's loss of one response as a term of the enumeration: each response is a batch of its own."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        found = []
        for own, reference, behavior in zip(logprobs, ref_logprobs, behavior_logprobs, strict=True):
            leaf = own.detach()[None].requires_grad_()
            value = loss(leaf, reference[None], behavior[None])
            (gradient,) = torch.autograd.grad(value, leaf)
            # The bracket is zero, with gradient one.
            found.append(value.detach() / len(own) + gradient[0] * (own - own.detach()))
        return torch.stack(found)

    return term


def judge(
    found: Moments, *, host: str, version: str, setting: str = "", default: bool = False, sampling: Sampling
) -> HostTerm:
    """Hold the moments of a host's term against the exact divergences.

    Args:
        found: What the enumeration of the term gave, at coefficient 1, on `problem_of(sampling)`.
        host, version, setting, default, sampling: As in `HostTerm`.
    """
    problem = problem_of(sampling)
    prefixes: Literal["pi", "mu"] = "pi" if sampling == "on-policy" else "mu"
    value, whole = exact(problem, "KL(pi||ref)", "sequence")
    token = exact(problem, "KL(pi||ref)", "token", prefixes)[1]
    candidates = {
        "KL(pi||ref) of responses": whole,
        **{f"{name} of tokens, prefixes of {prefixes}": exact(problem, name, "token", prefixes)[1]
           for name in PREFIX_DIVERGENCES},
    }  # fmt: skip
    gradient, size = found.gradient, float(whole.norm())
    vanishes = float(gradient.norm()) < ZERO * size
    matches = ["0"] if vanishes else [name for name, truth in candidates.items() if _off(gradient, truth) < ZERO]
    return HostTerm(
        host=host,
        version=version,
        setting=setting,
        default=default,
        sampling=sampling,
        value=_figure(found.value / value - 1),
        responses=_figure(_off(gradient, whole)),
        cos=None if vanishes else _figure(float((gradient * whole).sum() / gradient.norm()) / size),
        tokens=_figure(_off(gradient, token)),
        std=_figure(found.std / size),
        regularises=matches[0] if matches else "",
    )


def read_terms() -> list[HostTerm]:
    """Return the measured terms, in the order of the page."""
    return [HostTerm(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]


def _off(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def _figure(value: float) -> float:
    """Round to six digits, and to 0 what is rounding: the file is then the same on every machine."""
    return 0.0 if abs(value) < ZERO else float(f"{value:.6g}")
