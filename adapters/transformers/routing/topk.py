"""Answer the one question that every router asks: the top-k over one score per expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Call = Callable[..., Any]


class AnsweredTopK(TorchFunctionMode):
    """Answers a router's top-k over its experts; other operations run unchanged, even a top-k over groups of experts.

    Args:
        num_experts: Experts that the router ranks.
        top_k: Experts per token.
        select: Returns values and indices, given the scores and a function that computes torch's own answer.
        one_group: Whether all experts are one group. Its router first ranks the group by a top-k over `[R, 1, E]`, which is left
            unanswered.

    Attributes:
        calls: Number of times that the top-k over the experts was asked for.
        others: (number of scores, k) of each top-k that was left alone.
        chosen: The indices that were answered last.
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
