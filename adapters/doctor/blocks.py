"""Finds blocks in which an engine in this process computes differently, without a list of causes.

The trainer's blocks get the engine's input: what differs then is the block's own computation, not what came before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from mismatch_ext.adapters.doctor.asking import sequences
from torch import Tensor, nn
from torch.nn.functional import linear

from mismatch_ext.doctor import Sample
from mismatch_ext.doctor.diagnose import STANDS_OUT
from mismatch_ext.doctor.evidence import Block, Evidence, rescored
from mismatch_ext.doctor.fits import FLOAT32_UNITS, ROUNDING
from mismatch_ext.weights import OUTPUT_HEAD

if TYPE_CHECKING:
    from mismatch_ext.adapters.transformers.doctor.scorer import Scorer

At = tuple[int, str]
"""Layer and name of a block."""
# Blocks that engines and transformers cut out of a layer alike, and what they are called in words; others have their own names.
KINDS = {"self_attn": "attention", "mlp": "mlp"}
# Another block that errs by so much of its length, in an engine whose log-probabilities are off by rounding alone, is cut out
# differently: a factor stands inside of it on one side alone.
CUT_DIFFERENTLY = 0.1
# A fault of a few tokens, such as one expert's, shows in this quantile over tokens and not in the median.
QUANTILES = (0.5, 0.95)
# Limits over all sequences together, because two hidden states per token and block are held in memory.
MOST_TOKENS, MOST_ROWS = 1_024, 12
# Of these, so many are the longest ones: a window, and a wrong rotary table, show late in a sequence.
LONGEST = 4


@runtime_checkable
class ShowsBlocks(Protocol):
    """An engine that can show the hidden states of its blocks."""

    def blocks(self, rows: Sequence[Sequence[int]]) -> Sequence[Mapping[At, tuple[Tensor, Tensor]]]:
        """Return for each sequence the input and the output `[T, H]` of each block while the sequence is prefilled."""

    def head(self) -> tuple[Tensor, Tensor] | None:
        """Return hidden states `[N, H]`, and the logits `[N, V]` that the output head computes from them, without its bias.

        None if the head is quantized, or none of its own. V may be padded.
        """


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """Inputs and outputs of an engine's blocks, kept because the engine ends before they are compared; or why there are none."""

    rows: Sequence[Sequence[int]] = ()
    blocks: Sequence[Mapping[At, tuple[Tensor, Tensor]]] = ()
    head: tuple[Tensor, Tensor] | None = None
    missing: str = ""


def hidden_states(engine: object, sample: Sample) -> HiddenStates:
    """Keep the inputs and outputs of an engine's blocks on a few of the responses."""
    if not isinstance(engine, ShowsBlocks):
        return HiddenStates(missing="this engine is not in this process, or has no hooks")
    rows: list[list[int]] = []
    all_rows = sequences(sample)
    longest = sorted(range(len(all_rows)), key=lambda row: -len(all_rows[row]))[:LONGEST]
    for whole in (all_rows[row] for row in dict.fromkeys([*longest, *range(len(all_rows))])):
        if len(rows) < MOST_ROWS and sum(map(len, rows)) + len(whole) <= MOST_TOKENS:
            rows.append(whole)
    blocks = engine.blocks(rows)
    if not any(blocks):
        return HiddenStates(
            missing="its forward is compiled (give --engine-arg enforce_eager=true) or in chunks, or it has no list of layers"
        )
    return HiddenStates(rows=rows, blocks=blocks, head=engine.head())


def add_blocks(evidence: Evidence, states: HiddenStates, scorer: Scorer) -> None:
    """Add a comparison block by block to the evidence, if the engine shows its blocks, and a note."""
    blocks, note = alike(scorer, [] if states.missing else compared(scorer, states))
    if not blocks:
        missing = states.missing or note or "the trainer's layers are named otherwise"
        evidence.notes.append(f"not compared block by block: {missing}")
        return
    evidence.blocks = blocks
    evidence.notes.append(f"block by block, {'; '.join(filter(None, (summary(blocks), note)))}")


def summary(blocks: Sequence[Block]) -> str:
    """Return one line that sums up the blocks."""
    most = max(blocks, key=lambda block: block.ratio)
    if most.ratio < STANDS_OUT:
        return f"no block stands out of rounding: the largest of {len(blocks)} is {most.ratio:.1f} of it"
    kinds = dict.fromkeys(block.kind for block in blocks)
    ratios = {kind: [block.ratio for block in blocks if block.kind == kind] for kind in kinds}
    whole = [kind for kind, values in ratios.items() if len(values) > 1 and min(values) >= STANDS_OUT]
    count = sum(block.ratio >= STANDS_OUT for block in blocks)
    where = f"; all of {' and '.join(whole)}" if whole else f"; {count} of {len(blocks)} blocks"
    return f"largest at {most.place}: {most.ratio:.1f} of rounding's{where}"


def compared(scorer: Scorer, states: HiddenStates) -> list[Block]:
    """Compare an engine's blocks with the trainer's in float32, and the trainer's in the engine's dtype with the same.

    The output head is the last block.
    """
    blocks = blocks_of(scorer.model)
    by_row = _renamed(states.blocks, blocks)
    errors: dict[At, list[Tensor]] = {}
    rounding: dict[At, list[Tensor]] = {}
    for ids, parts in zip(states.rows, by_row, strict=True):
        exact = _outputs(scorer.model, blocks, ids, parts)
        rounded = exact
        if scorer.engine_dtype != torch.float32:
            with scorer.cast(scorer.engine_dtype):
                rounded = _outputs(scorer.model, blocks, ids, parts)
        for at, (_, engines) in parts.items():
            if at in exact and engines.shape == exact[at].shape:
                length = exact[at].norm(dim=-1).clamp(min=1e-6)
                errors.setdefault(at, []).append((engines.float() - exact[at]).norm(dim=-1) / length)
                rounding.setdefault(at, []).append((rounded[at] - exact[at]).norm(dim=-1) / length)
    largest = [_block(at, torch.cat(errors[at]), torch.cat(rounding[at])) for at in sorted(errors)]
    head = compared_head(scorer, states.head)
    return largest if head is None else [*largest, head]


def compared_head(scorer: Scorer, engines: tuple[Tensor, Tensor] | None) -> Block | None:
    """Compare the logits of an engine's output head with those of the trainer's, as `compared` compares blocks."""
    from mismatch_ext.adapters.transformers.head import head_of

    head = head_of(scorer.model)
    if engines is None or head is None:
        return None
    hidden, logits = (tensor.cpu().float() for tensor in engines)
    weight = head.weight.detach().cpu().float()
    if hidden.shape[1] != weight.shape[1] or logits.shape[1] < weight.shape[0]:
        return None
    dtype = scorer.engine_dtype
    exact = linear(hidden, weight)
    rounded = linear(hidden.to(dtype), weight.to(dtype)).float()
    length = exact.norm(dim=-1)
    error = (logits[:, : len(weight)] - exact).norm(dim=-1) / length
    rounding_error = (rounded - exact).norm(dim=-1) / length
    layers = {at[0] for at in blocks_of(scorer.model)}
    return _block((len(layers), OUTPUT_HEAD), error, rounding_error)


def _block(at: At, error: Tensor, rounding_error: Tensor) -> Block:
    """Return a block's error and rounding over tokens, by the quantile in which the block stands out most."""
    sizes = [
        Block(
            layer=at[0],
            kind=KINDS.get(at[1], at[1]),
            error=float(error.quantile(q)),
            own=float(rounding_error.quantile(q)),
        )
        for q in QUANTILES
    ]
    return max(sizes, key=lambda block: block.ratio)


def alike(scorer: Scorer, blocks: Sequence[Block]) -> tuple[tuple[Block, ...], str]:
    """Return the blocks that both sides cut out of their layers alike, and which are left out; empty if none is."""
    size, error = rescored(scorer.sample, scorer.scores)
    if size > ROUNDING and float(np.abs(error).mean()) > FLOAT32_UNITS * scorer.scores.float32_error:
        return tuple(blocks), ""
    kept = tuple(block for block in blocks if block.kind in KINDS.values() or block.error < CUT_DIFFERENTLY)
    others = dict.fromkeys(block.kind for block in blocks if block not in kept)
    if not others:
        return kept, ""
    count = len(blocks) - len(kept)
    return (
        kept,
        f"{count} of {len(blocks)} blocks ({', '.join(others)}) are left out, because one side cuts them differently",
    )


def _renamed(
    states: Sequence[Mapping[At, tuple[Tensor, Tensor]]], blocks: Mapping[At, nn.Module]
) -> list[dict[At, tuple[Tensor, Tensor]]]:
    """Give an engine's blocks the trainer's names: the one of a layer that has no namesake is the trainer's one that has none."""
    seen = {at for parts in states for at in parts}
    trainers: dict[At, At] = {}
    for layer in {at[0] for at in seen}:
        own, engines = ({at for at in names if at[0] == layer} for names in (blocks.keys(), seen))
        if len(own - engines) == len(engines - own) == 1:
            trainers[next(iter(engines - own))] = next(iter(own - engines))
    return [{trainers.get(at, at): tensors for at, tensors in parts.items()} for parts in states]


def _outputs(
    model: nn.Module, blocks: Mapping[At, nn.Module], ids: Sequence[int], parts: Mapping[At, tuple[Tensor, Tensor]]
) -> dict[At, Tensor]:
    """Run a model with the inputs of an engine's blocks instead of its own, and return its blocks' outputs `[T, H]`."""
    outputs: dict[At, Tensor] = {}
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype

    def before(at: At) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            hidden = parts[at][0].to(device, dtype)[None]
            if inputs:
                return (hidden, *inputs[1:]), named
            name = "hidden_states" if "hidden_states" in named else next(iter(named))
            return inputs, {**named, name: hidden}

        return hook

    def after(at: At) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            outputs[at] = out.reshape(-1, out.shape[-1]).float().cpu()

        return hook

    # Without the output head, which costs as much as a vocabulary is large.
    body = getattr(model, "base_model", model)
    with hooked({at: block for at, block in blocks.items() if at in parts}, before, after), torch.no_grad():
        body(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
    return outputs


def blocks_of(model: nn.Module) -> dict[At, nn.Module]:
    """Return the blocks of a decoder by layer and name: what has parts, unlike a norm, in the largest list of modules.

    Weights do not tell them apart: vLLM packs them on a CPU, and leaves empty tensors.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=lambda module: sum(1 for _ in module.modules()), default=())
    return {
        (number, name): block
        for number, layer in enumerate(layers)
        for name, block in layer.named_children()
        if next(block.children(), None) is not None
    }


@contextmanager
def hooked(
    blocks: Mapping[At, nn.Module],
    before: Callable[[At], Callable[..., Any]],
    after: Callable[[At], Callable[..., Any]],
) -> Iterator[None]:
    """Hook blocks for a while: `before` and `after` make the hooks around a block's forward, the first with keyword arguments."""
    hooks = []
    for at, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(before(at), with_kwargs=True))
        hooks.append(block.register_forward_hook(after(at)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
