"""What docs say of TRL's and verl's own KL terms is what was measured, and the measure can tell terms apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mismatch_ext.testing import moments, row_term
from tests.oracles.kl.hosts import HostTerm, judge, problem_of, read_terms


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    d = logprobs - ref_logprobs
    return torch.exp(-d) - 1 + d


def judged(sampling: str, loss: object) -> HostTerm:
    found = moments(problem_of(sampling), row_term(loss))  # type: ignore[arg-type]
    return judge(found, host="TRL", version="0", sampling=sampling)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "differentiable"), [("use_bias_correction_kl=True", True), ("use_bias_correction_kl=False", None)]
)
@pytest.mark.parametrize("sampling", ["on-policy", "off-policy"])
def test_trls_terms_are_the_formulas_that_the_page_gives(
    setting: str, differentiable: bool | None, sampling: str
) -> None:
    def loss(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        ratio = torch.exp(logprobs - behavior_logprobs) if differentiable else torch.ones_like(logprobs)
        return (k3(logprobs, ref_logprobs) * ratio).sum()

    by_hand = judged(sampling, loss)
    measured = [t for t in read_terms() if t.host == "TRL" and (t.setting, t.sampling) == (setting, sampling)]
    assert {t.version for t in measured} >= {"1.13.0", "1.14.2", "1.16.0"}
    for term in measured:
        assert by_hand.regularizes == term.regularizes
        for figure in ("value", "responses", "cos", "tokens", "std"):
            assert getattr(by_hand, figure) == pytest.approx(getattr(term, figure), rel=1e-5, abs=1e-8), figure


def test_a_ratio_under_a_stop_gradient_is_another_term() -> None:
    # The mistake to guard against: off-policy such a ratio corrects the value, and the gradient is the forward KL's.
    def loss(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        return (k3(logprobs, ref_logprobs) * torch.exp(logprobs - behavior_logprobs).detach()).sum()

    assert judged("on-policy", loss).regularizes == "KL(ref||pi) of tokens, prefixes of pi"
    assert judged("off-policy", loss).regularizes == "KL(ref||pi) of tokens, prefixes of mu"
