"""What an engine's output head computes, compared with the weights that it holds, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.vllm import head
from torch import Tensor, nn
from torch.nn.functional import linear

pytestmark = pytest.mark.numeric


def compared(
    monkeypatch: pytest.MonkeyPatch, held: Tensor, packed: Tensor, head_dtype: torch.dtype | None = None
) -> Any:
    method = SimpleNamespace(apply=lambda layer, hidden: linear(hidden, packed))
    monkeypatch.setattr(head, "_plain_heads", lambda model: iter([SimpleNamespace(weight=held, quant_method=method)]))
    model = nn.Sequential(nn.Identity())
    model[0].head_dtype = head_dtype
    return head.compare_head(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_packed_copy_of_other_weights_differs_and_one_of_these_does_not(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    weight = torch.randn(3000, 256, generator=torch.Generator().manual_seed(0))
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    held, size = weight.to(dtype), 50 * torch.finfo(dtype).eps
    same = compared(monkeypatch, held, held)
    assert same.equal and same.max_abs_diff == 0.0
    stale = compared(monkeypatch, held, (weight + size * change).to(dtype))
    assert not stale.equal and stale.max_abs_diff > 0


def test_a_head_that_computes_in_another_dtype_than_its_weights_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(64, 32).bfloat16()
    assert compared(monkeypatch, weight, weight, torch.float32) is None
    assert compared(monkeypatch, weight, weight, torch.bfloat16).equal
