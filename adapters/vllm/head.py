"""The output head of a vLLM engine in this process: packed again after an update on a CPU, and compared with its weights.

A CPU engine computes logits from a packed copy of the head's weights. A head that is tied to the embeddings has no tensor of
its own in a checkpoint, so vLLM's reload loads the shared weights and keeps the packed copy of those before:
https://github.com/vllm-project/vllm/blob/v0.30.0/vllm/model_executor/model_loader/reload/layerwise.py
`docs/upstream/vllm_tied_head.py` shows it, and prints "fixed" once `repack_tied_heads` can go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mismatch_ext.weights import OUTPUT_HEAD, TensorComparison

HIDDEN_STATES = 4
"""Number of random hidden states that the head is given."""
COMPARED_ROWS = 1024
"""About this many tokens' logits are compared."""
FACTOR = 10.0
"""The head holds other weights if its error exceeds this many times the rounding of the same product in the same dtype."""


def repack_tied_heads(model: nn.Module) -> None:
    """Pack the output heads of a CPU engine again, from the weights that they hold now.

    Args:
        model: The engine's model, after its weights were reloaded.
    """
    for head in _plain_heads(model):
        head.quant_method.process_weights_after_loading(head)


def compare_head(model: nn.Module) -> TensorComparison | None:
    """Compare what a CPU engine's output head computes with the product of its input and the weights that it holds.

    The engine keeps a packed copy of the head. A copy that an update has missed is wrong at every token, while all tensors are
    right. The bound is ten times the rounding of the same product in the same dtype.

    Args:
        model: The engine's model, on a CPU. Elsewhere the head has no copy, and kernels of less precision would look like one.

    Returns:
        The comparison, with the largest difference of a logit; None if the model has no plain head of its own.
    """
    head = plain_head(model)
    if head is None:
        return None
    hidden, logits = compute_logits(head)
    stride = max(1, head.weight.shape[0] // COMPARED_ROWS)
    rows = head.weight.detach()[::stride]
    exact = linear(hidden.double(), rows.double())
    rounding = (linear(hidden, rows).double() - exact).abs().mean()
    # A product of a few numbers may be exact; a logit is still rounded to its dtype, by an eighth of a unit or more on average.
    least = torch.finfo(rows.dtype).eps / 8 * float(exact.abs().mean())
    difference = (logits[:, ::stride].double() - exact).abs()
    is_equal = bool(difference.mean() <= FACTOR * rounding.clamp(min=least))
    return TensorComparison(
        name=OUTPUT_HEAD,
        equal=is_equal,
        max_abs_diff=0.0 if is_equal else float(difference.max()),
    )


@torch.no_grad()
def compute_logits(head: Any) -> tuple[Tensor, Tensor]:
    """Return random hidden states `[N, H]` in the head's dtype, and what the head computes from them `[N, V]`, without bias.

    The states are the same each time, and no global random number is drawn. V may be padded.

    Args:
        head: A head that `plain_head` returned.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(HIDDEN_STATES, head.weight.shape[1], generator=generator)
    hidden = hidden.to(head.weight.device, head.weight.dtype)
    return hidden, head.quant_method.apply(head, hidden)


def plain_head(model: nn.Module) -> Any | None:
    """Return the engine's output head; None if it has none of its own here, a quantized one, or computes in another dtype."""
    dtypes = {getattr(module, "head_dtype", None) for module in model.modules()} - {None}
    for head in _plain_heads(model):
        is_here = not head.weight.is_meta and head.weight.numel() > 0
        if is_here and dtypes <= {head.weight.dtype}:
            return head
    return None


def _plain_heads(model: nn.Module) -> Iterator[Any]:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            yield layer
