"""Where an engine in this process first computes otherwise than the trainer, with no list of causes."""

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

# Of all sequences together: what is held of each is twice a hidden state for every block.
MOST_TOKENS, MOST_ROWS = 1_024, 12


@runtime_checkable
class ShowsBlocks(Protocol):
    """An engine whose blocks can be looked into."""

    def blocks(self, rows: Sequence[Sequence[int]]) -> Sequence[Mapping[At, tuple[Tensor, Tensor]]]:
        """Return what each block is given, and gives, while a sequence is prefilled, `[T, H]`."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What was kept of an engine before it ended.

    Args:
        rows: Token ids of each sequence.
        blocks: What its blocks were given, and gave.
        missing: Why there is nothing; "" where there is.
    """

    rows: Sequence[Sequence[int]] = ()
    blocks: Sequence[Mapping[At, tuple[Tensor, Tensor]]] = ()
    missing: str = ""


def held_blocks(engine: DoctorsEngine, sample: Sample) -> Held:
    """Keep what an engine's blocks are given, and give, on a few of the responses.

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
    """Return a diagnosis with its blocks where something is left, or where the run asks for them."""
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
