"""Weight updates into an in-process engine, and exact comparison of what can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from mismatch_ext.adapters.vllm.engine import is_cpu, runner
from mismatch_ext.adapters.vllm.head import repack_tied_heads
from mismatch_ext.adapters.vllm.routing import reset_prefix_cache
from mismatch_ext.patches.vllm.cpu_moe_repack import cpu_moe_repack
from torch import Tensor

from mismatch_ext.patching import applied
from mismatch_ext.weights import TensorComparison

if TYPE_CHECKING:
    from vllm import LLM

# Parts of a parameter name that vLLM keeps under the checkpoint's own name and layout. Linear and expert weights are
# fused, padded or packed and are covered by the probe log-probabilities instead.
COMPARABLE = ("embed_tokens.weight", "norm.weight", "layernorm.weight")

# About so many rows of an embedding are compared, because a copy of a whole embedding can take a gigabyte.
SAMPLED_ROWS = 1024


def update_weights(llm: LLM, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Load new weights through vLLM's layer-wise reload, which undoes and redoes its weight packing.

    The prefix cache is reset as well, because it was computed with the weights before.

    Loading tensor by tensor into a CPU engine fails (its packed linear layers have lost their weight loader) or, for
    mixture-of-experts layers, silently leaves unpacked weights in a packed layout. The reload itself leaves experts and tied
    output heads with the packed weights of before on a CPU; both are packed again here.

    Args:
        llm: An engine in this process.
        named_parameters: Checkpoint names and tensors of the whole model.

    Raises:
        EngineError: Unfinished requests hold blocks of the prefix cache.
    """
    # Copies, because vLLM keeps a tensor until its layer is complete (for a padded vocabulary until the very end), and by then
    # TRL has unmerged the LoRA adapters from it again.
    copies = ((name, parameter.detach().clone()) for name, parameter in named_parameters)
    on_cpu = is_cpu(llm)
    with applied(*(cpu_moe_repack() if on_cpu else ())):
        runner(llm).reload_weights(weights_iterator=copies, is_checkpoint_format=True)
    if on_cpu:
        repack_tied_heads(runner(llm).model)
    # vLLM leaves the reset to the caller; otherwise cached prompts would keep keys, values and routes of the weights before.
    reset_prefix_cache(llm)


def is_comparable(name: str) -> bool:
    """Tell whether vLLM keeps a parameter under its name and in its layout."""
    return name.endswith(COMPARABLE)


@dataclass(frozen=True, kw_only=True)
class SentTensor:
    """Rows of a tensor that was sent, for comparison with what the engine then holds.

    Args:
        values: Every `stride`-th row, as sent.
        rows: Rows of the whole tensor; vLLM pads the vocabulary beyond them.
        stride: Step between the rows.
    """

    values: Tensor
    rows: int
    stride: int


def sample_rows(parameter: Tensor) -> SentTensor:
    """Copy a norm's weights, or about a thousand rows of an embedding."""
    stride = max(1, parameter.shape[0] // SAMPLED_ROWS) if parameter.dim() > 1 else 1
    return SentTensor(values=parameter.detach()[::stride].clone(), rows=parameter.shape[0], stride=stride)


def digest_of_rows(values: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes; by it a server's tensor is compared without being sent."""
    flat = values.detach().contiguous().cpu().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


class Sending:
    """Notes what a weight update sends: dtypes, and samples of what the engine should then hold.

    Attributes:
        dtypes: Names of the dtypes that were sent.
        samples: By checkpoint name, rows of each tensor that can be compared.
    """

    def __init__(self) -> None:
        self.dtypes: set[str] = set()
        self.samples: dict[str, SentTensor] = {}

    def note(self, name: str, parameter: Tensor) -> None:
        """Note a tensor that is about to be sent."""
        self.dtypes.add(str(parameter.dtype).removeprefix("torch."))
        if is_comparable(name):
            self.samples[name] = sample_rows(parameter)

    def through(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Note each tensor, and yield it unchanged."""
        for name, parameter in named_parameters:
            self.note(name, parameter)
            yield name, parameter


def compare_tensors(
    llm: LLM, sent: Mapping[str, SentTensor], previous: Mapping[str, SentTensor]
) -> list[TensorComparison]:
    """Compare embeddings and norms of the engine with what was sent, bit by bit after rounding to the engine's dtype.

    Args:
        llm: An engine in this process.
        sent: By checkpoint name, what the last weight update sent.
        previous: By checkpoint name, what the update before sent, to recognize an engine that kept those weights.

    Returns:
        One comparison per tensor found on both sides.
    """
    held = dict(runner(llm).model.named_parameters())
    comparisons: list[TensorComparison] = []
    for name, now in sent.items():
        if name not in held:
            continue
        engine = held[name].detach()[: now.rows : now.stride]
        expected = now.values.to(device=engine.device, dtype=engine.dtype)
        if engine.shape != expected.shape:
            continue
        equal = torch.equal(engine, expected)
        largest = 0.0 if equal else float((engine.float() - expected.float()).abs().max())
        before = previous.get(name)
        stale = None
        if before is not None:
            stale = torch.equal(engine, before.values.to(device=engine.device, dtype=engine.dtype))
        comparisons.append(TensorComparison(name=name, equal=equal, max_abs_diff=largest, matches_previous=stale))
    return comparisons
