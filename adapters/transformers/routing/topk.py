"""The one question that every router asks: its top-k over one score per expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Call = Callable[..., Any]


class AnsweredTopK(TorchFunctionMode):
    """Answers a router's question for its experts; other operations, top-ks over groups of experts too, are left alone.

    Args:
        num_experts: Experts that the router ranks.
        top_k: Experts per token.
        select: Returns values and indices, given the scores and a function that computes torch's own answer.
        one_group: Whether the experts are one group `[R, 1, E]`, whose best K scores are asked for to rank the group.

    Attributes:
        calls: Times that the question was asked.
        others: (scores, k) of the top-ks that were left alone.
        chosen: The indices that were answered.
    """

    def __init__(self, num_experts: int, top_k: int, select: Call, *, one_group: bool = False) -> None:
        super().__init__()
        self._shape = num_experts, top_k
        self._select = select
        self._one_group = one_group
        self.calls = 0
        self.others: list[tuple[int, int]] = []
        self.chosen: Tensor | None = None

    def __torch_function__(self, func: Call, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a top-k of the expected shape, and run everything else."""
        kwargs = kwargs or {}
        if func is not torch.topk and func is not Tensor.topk:
            return func(*args, **kwargs)
        scores, k, dim = _arguments(*args, **kwargs)
        of_group = self._one_group and scores.dim() == 3 and scores.shape[1] == 1
        if of_group or (scores.shape[-1], k) != self._shape or dim not in (-1, scores.dim() - 1):
            self.others.append((scores.shape[-1], k))
            return func(*args, **kwargs)
        self.calls += 1
        values, self.chosen = self._select(scores, partial(func, *args, **kwargs))
        return torch.return_types.topk((values, self.chosen))


def _arguments(input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> tuple[Tensor, int, int]:
    return input, k, dim
