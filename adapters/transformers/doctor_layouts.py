"""How trainers lay out sequences in a batch, and how much the layout changes their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.doctor.diagnose import Rung
from mismatch_ext.doctor.sample import Floats

if TYPE_CHECKING:
    from mismatch_ext.adapters.transformers.doctor import Scorer

# Layouts that a run's trainer may use, by the value of --trainer-layout.
LAYOUTS = {
    "right": "padding on the right",
    "left": "prompts padded on the left, without position_ids",
    "left-positions": "prompts padded on the left, with position_ids",
    "packed": "sequences packed into one row",
}
# Most responses that each rung is measured on, and responses of a batch, as in a trainer.
ROWS, BATCH = 32, 8


@dataclass(frozen=True, kw_only=True)
class Laid:
    """Sequences as a model is given them.

    Args:
        ids: Token ids `[B, S]`.
        mask: 1 for tokens that are not padding `[B, S]`; None for a packed row, in which positions tell sequences apart.
        positions: Position ids `[B, S]`; None if the model counts the columns.
        places: For each response, its row of the batch and the column of its first token.
        lengths: For each response, its number of tokens together with its prompt's.
    """

    ids: Tensor
    mask: Tensor | None
    positions: Tensor | None
    places: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]


def laid(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], layout: str) -> Laid:
    """Lay prompts and responses into a batch.

    Args:
        prompts: Token ids of each prompt.
        responses: Token ids of each response.
        layout: A key of `LAYOUTS`. "left" is TRL's layout, in which all prompts end, and all responses begin, in one column.
    """
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    if layout == "packed":
        starts = np.cumsum([0, *map(len, rows)])[:-1]
        return Laid(
            ids=torch.tensor([[token for row in rows for token in row]]), mask=None,
            positions=torch.tensor([[at for row in rows for at in range(len(row))]]),
            places=tuple((0, int(start) + len(prompt)) for start, prompt in zip(starts, prompts, strict=True)),
            lengths=tuple(map(len, rows)),
        )  # fmt: skip
    longest = max(map(len, prompts)) if layout.startswith("left") else 0
    before = [longest - len(prompt) if longest else 0 for prompt in prompts]
    width = max(left + len(row) for left, row in zip(before, rows, strict=True))
    fill = [(left, width - left - len(row)) for left, row in zip(before, rows, strict=True)]
    ids = torch.tensor([[0] * left + row + [0] * right for (left, right), row in zip(fill, rows, strict=True)])
    mask = torch.tensor(
        [[0] * left + [1] * len(row) + [0] * right for (left, right), row in zip(fill, rows, strict=True)]
    )
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if layout == "left-positions" else None
    places = tuple((row, left + len(prompt)) for row, (left, prompt) in enumerate(zip(before, prompts, strict=True)))
    return Laid(ids=ids, mask=mask, positions=positions, places=places, lengths=tuple(map(len, rows)))


def own_noise(scorer: Scorer) -> Iterator[Rung]:
    """Yield how much the trainer differs from itself in smaller batches and in other layouts, on some of the responses.

    Args:
        scorer: The scorer of the sample, with the trainer's own weights.
    """
    sample = scorer.sample
    kept = [row for row, mask in enumerate(sample.masks) if any(mask)]
    rows = kept[:: -(-len(kept) // ROWS)]
    part = sample.part(rows)

    def scored(layout: str, *, rows: int = BATCH, exact: bool = False) -> Floats:
        return scorer.in_layout(part, layout, most_rows=rows, exact=exact)

    straight, exact = scored("right"), scored("right", exact=True)
    yield Rung.of("trainer", f"batches of 1 against {BATCH}", scored("right", rows=1) - straight)
    for layout, name in LAYOUTS.items():
        if layout != "right":
            yield Rung.of("trainer", name, scored(layout) - straight, scored(layout, exact=True) - exact)
