"""The bound that float32's own error makes: another order of sums is within it, a tenth of any fault that it is for is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models import tiny_model
from tests.oracle import expect_float32, float32_error, logprobs

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module", params=["dense", "moe"])
def scored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tensor, float]:
    """Return a model, eight rows of 17 tokens and the model's own error on them."""
    folder = tiny_model(request.param, tmp_path_factory.mktemp("oracle") / request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(2, 16, (8, 17), generator=torch.Generator().manual_seed(0))
    return model, ids, float32_error(model, ids, torch.ones_like(ids), torch.ones_like(ids))


def step(gap: Tensor) -> dict[str, float]:
    """Return what a step logs of its gaps."""
    wide = gap.double()
    return {
        "mismatch/logp_abs_diff_mean": float(wide.abs().mean()),
        "mismatch/k3_kl": float((wide.expm1() - wide).mean()),
    }


def test_another_order_of_sums_is_within_the_bound(scored: tuple[Any, Tensor, float]) -> None:
    model, ids, error = scored
    whole = logprobs(model, ids, torch.ones_like(ids))
    # Row by row and token by token, as an engine decodes: other shapes, hence other kernels.
    alone = torch.cat(
        [
            torch.cat([logprobs(model, row[None, : n + 2], torch.ones(1, n + 2))[:, -1:] for n in range(16)], 1)
            for row in ids
        ]
    )
    assert not torch.equal(whole, alone)
    expect_float32([step(whole - alone)], [error])


def test_one_wrong_token_is_beyond_it(scored: tuple[Any, Tensor, float]) -> None:
    # A token's log-probability of another row, position or temperature is tenths of a nat away at least.
    _, _, error = scored
    gap = torch.zeros(100)
    gap[7] = 0.01
    with pytest.raises(AssertionError):
        expect_float32([step(gap)], [error])


def test_weights_that_are_stale_by_a_tenth_of_a_step_are_beyond_it(scored: tuple[Any, Tensor, float]) -> None:
    # The runs take steps of 1e-3, of which Adam's first moves every weight by the whole.
    model, ids, error = scored
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1e-4 * torch.randn(parameter.shape, generator=generator).sign())
    mask = torch.ones_like(ids)
    with pytest.raises(AssertionError):
        expect_float32([step(logprobs(model, ids, mask) - logprobs(other, ids, mask))], [error])


def test_a_model_that_float32_does_not_determine_is_no_oracle(scored: tuple[Any, Tensor, float]) -> None:
    model, ids, _ = scored
    rough = copy.deepcopy(model)
    with torch.no_grad():
        rough.model.layers[0].self_attn.o_proj.weight.mul_(float("nan"))
    with pytest.raises(AssertionError, match="no oracle"):
        float32_error(rough, ids, torch.ones_like(ids), torch.ones_like(ids))
