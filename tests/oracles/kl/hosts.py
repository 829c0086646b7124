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
from tests.oracles.kl.text import number, table

RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprobs, ref_logprobs, behavior_logprobs) of one response, each [1, T] -> its KL term at coefficient 1, summed, 0-d."""

Sampling = Literal["on-policy", "off-policy"]
SAMPLINGS: tuple[Sampling, ...] = ("on-policy", "off-policy")
FILE = Path(__file__).with_name("hosts.json")
ZERO = 1e-9
"""Relative size below which a figure is rounding."""

TEXT = """\
## TRL's and verl's own KL terms

Measured by `python -m tests.kl_hosts` through the hosts' own code: TRL's `GRPOTrainer._compute_loss` and verl's `ppo_loss`, or
`apply_kl_penalty`, on the policy of the tables above, without another reward, in float64. Settings that are not named are
the host's defaults, except that the KL term is on: `GRPOTrainer` and verl come without one (`beta=0.0`; `use_kl_loss` and
`use_kl_in_reward` False). Tests measure again and hold the figures, for each TRL version of the
compatibility table. Responses are of one length: what denominators do with unequal ones is not in this.

*responses*: norm of the bias of the expected gradient against that of KL(pi\\|\\|ref) of whole responses, over the norm of the
latter, with its cosine. *tokens*: the same against the per-token reverse KL, which credits no token with the KL of later ones;
its prefixes are those that were sampled. *value* is against KL(pi\\|\\|ref) of responses. Off-policy, mu is the policy that
sampled, and the host knows its log-probabilities exactly as its old ones: a later optimizer step on the same batch."""

NOTES = """\
- **TRL since 1.10** (`GRPOTrainer`) multiplies k3 by the ratio pi/pi_old of the token (`use_bias_correction_kl=True`). The
  ratio is differentiable, so that this counts on-policy too, where it is 1: the expected gradient is exactly that of the
  per-token reverse KL. What it lacks is credit to earlier tokens for the KL of later ones: on-policy that is all of the
  difference from KL(pi\\|\\|ref) of responses. Off-policy prefixes are those of mu as well. TRL's documentation says that this
  holds for `importance_sampling_level="token"`, the default. With vLLM pi_old is the trainer's own policy, so that the ratio
  corrects for updates and not for the engine's numerics.
- **TRL up to 1.9**, and later with `use_bias_correction_kl=False`: k3 without a ratio, whose gradient on-policy is the forward
  KL of single tokens, KL(ref\\|\\|pi), and off-policy that of none of these divergences.
- **verl 0.9.1** with `use_kl_loss=True` has the same term by default (`kl_loss_type=low_var_kl`), clamped: d to +-20 and k3 to
  10, which nothing reaches here. A `+` behind the name, which verl's YAML does not list (`k3+`, `low_var_kl+`), keeps the value
  and takes the gradient of k2: on-policy exactly the per-token reverse KL. None of its losses has a ratio, so off-policy they
  are those of samples of mu taken for samples of pi.
- **verl 0.9.1** with `use_kl_in_reward=True` takes k1 (`kl_penalty=kl`) off each token's reward. With `adv_estimator=rloo` and
  one update a batch that is unbiased for KL(pi\\|\\|ref) of responses (*std* is without the baseline that
  several responses to a prompt have). Estimators that divide by a spread of the rewards (`grpo`, whitening) rescale the KL with
  it; with a critic it depends on the critic."""


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


def hosts_section() -> list[str]:
    """Return the part of the page about the hosts' own terms."""
    header = ["host", "setting", "sampling", "value", "responses", "cos", "tokens", "std", "its gradient is that of"]
    rows = []
    for term in read_terms():
        setting = f"`{term.setting}`" if term.setting else ""
        rows.append(
            [
                f"{term.host} {term.version}",
                " ".join(part for part in ("**default**" if term.default else "", setting) if part),
                term.sampling,
                *(
                    "" if x is None else number(x)
                    for x in (term.value, term.responses, term.cos, term.tokens, term.std)
                ),
                term.regularises or "none of these",
            ]
        )
    return [TEXT, table(header, rows), NOTES]


def _off(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def _figure(value: float) -> float:
    """Round to six digits, and to 0 what is rounding: the file is then the same on every machine."""
    return 0.0 if abs(value) < ZERO else float(f"{value:.6g}")
