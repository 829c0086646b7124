"""Finds the first block in which an engine in this process computes otherwise than the trainer, without a list of causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mismatch_ext.adapters.doctor.sides import DoctorsEngine, Run

from mismatch_ext.doctor import Diagnosis, Sample
from mismatch_ext.doctor.asking import sequences
from mismatch_ext.doctor.blocks import At, said

if TYPE_CHECKING:
    from mismatch_ext.adapters.transformers.doctor import Scorer
    from torch import Tensor

# Limits over all sequences together, because two hidden states per token and block are held in memory.
MOST_TOKENS, MOST_ROWS = 1_024, 12


@runtime_checkable
class ShowsBlocks(Protocol):
    """An engine that can show the hidden states of its blocks."""

    def blocks(self, rows: Sequence[Sequence[int]]) -> Sequence[Mapping[At, tuple[Tensor, Tensor]]]:
        """Return for each sequence the input and the output `[T, H]` of each block while the sequence is prefilled."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Inputs and outputs of an engine's blocks, kept because the engine ends before they are compared.

    Args:
        rows: Token ids of each sequence.
        blocks: For each sequence, the input and the output of each block.
        missing: Why nothing was kept; "" if something was.
    """

    rows: Sequence[Sequence[int]] = ()
    blocks: Sequence[Mapping[At, tuple[Tensor, Tensor]]] = ()
    missing: str = ""


def held_blocks(engine: DoctorsEngine, sample: Sample) -> Held:
    """Keep the inputs and outputs of an engine's blocks on a few of the responses.

    Raises:
        MismatchError: The engine refuses a request.
    """
    if not isinstance(engine, ShowsBlocks):
        return Held(missing="this engine is not in this process, or has no hooks")
    rows: list[list[int]] = []
    for whole in sequences(sample):
        if len(rows) < MOST_ROWS and sum(map(len, rows)) + len(whole) <= MOST_TOKENS:
            rows.append(whole)
    blocks = engine.blocks(rows)
    if not any(blocks):
        return Held(
            missing="its forward is compiled (give --engine-arg enforce_eager=true) or in chunks, or its layers have other names"
        )
    return Held(rows=rows, blocks=blocks)


def with_blocks(found: Diagnosis, held: Held, sides: Run, scorer: Scorer) -> Diagnosis:
    """Return a diagnosis with a comparison block by block if a part of the gap is unexplained, or if the run asks for it."""
    from mismatch_ext.adapters.transformers.doctor_blocks import compared

    if found.verdict not in ("partly", "unexplained") and not sides.blocks:
        return found
    if held.missing:
        return replace(found, notes=(*found.notes, f"not compared block by block: {held.missing}"))
    blocks = tuple(compared(scorer, held.rows, held.blocks))
    if not blocks:
        return replace(
            found, notes=(*found.notes, "not compared block by block: the trainer's layers are named otherwise")
        )
    return replace(found, blocks=blocks, notes=(*found.notes, f"block by block, {said(blocks)}"))
