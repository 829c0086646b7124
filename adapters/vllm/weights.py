"""Weight updates into an in-process engine, and exact comparison of what can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from mismatch_ext.adapters.vllm.engine import runner
from mismatch_ext.patches.vllm.cpu_moe_repack import CPU_MOE_REPACK
from torch import Tensor

from mismatch_ext.patching import applied
from mismatch_ext.weight_sync import TensorComparison

if TYPE_CHECKING:
    from vllm import LLM

# Parts of a parameter name that vLLM keeps under the checkpoint's own name and layout. Linear and expert weights are
# fused, padded or packed and are covered by the probe log-probabilities instead.
COMPARABLE = ("embed_tokens.weight", "norm.weight", "layernorm.weight")


def update_weights(llm: LLM, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Load new weights through vLLM's layer-wise reload, which undoes and redoes its weight packing.

    Loading tensor by tensor into a CPU engine fails (its packed linear layers have lost their weight loader) or, for
    mixture-of-experts layers, silently leaves unpacked weights in a packed layout.

    Args:
        llm: An engine in this process.
        named_parameters: Checkpoint names and tensors of the whole model.
    """
    with applied(CPU_MOE_REPACK):
        runner(llm).reload_weights(weights_iterator=iter(named_parameters), is_checkpoint_format=True)


def compare_tensors(
    llm: LLM, named_parameters: Iterable[tuple[str, Tensor]], previous: dict[str, Tensor]
) -> tuple[list[TensorComparison], dict[str, Tensor]]:
    """Compare embeddings and norms of the engine with the trainer's, bit by bit after rounding to the engine's dtype.

    Args:
        llm: An engine in this process.
        named_parameters: Checkpoint names and tensors of the trainer's model.
        previous: Norm weights returned by the call before, to recognise an engine that kept them.

    Returns:
        One comparison per tensor found on both sides, and the norm weights as the engine should now hold them.
    """
    held = dict(runner(llm).model.named_parameters())
    comparisons: list[TensorComparison] = []
    expected: dict[str, Tensor] = {}
    for name, parameter in named_parameters:
        if not name.endswith(COMPARABLE) or name not in held:
            continue
        engine = held[name].detach()
        trainer = parameter.detach().to(device=engine.device, dtype=engine.dtype)
        # vLLM pads the vocabulary of an embedding; rows beyond the checkpoint's are its own.
        engine = engine[: trainer.shape[0]]
        if engine.shape != trainer.shape:
            continue
        if trainer.dim() == 1:
            expected[name] = trainer.clone()
        equal = torch.equal(engine, trainer)
        before = previous.get(name)
        comparisons.append(
            TensorComparison(
                name=name,
                equal=equal,
                max_abs_diff=0.0 if equal else float((engine.float() - trainer.float()).abs().max()),
                matches_previous=None if before is None else torch.equal(engine, before),
            )
        )
    return comparisons, expected
