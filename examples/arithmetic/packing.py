"""The training data of the example models: demonstrations, packed without padding between them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from examples.arithmetic.recipe import Recipe
from examples.arithmetic.task import demonstration, format_prompt, sample_problem
from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, encode

IGNORED = -100
"""Target of tokens that carry no loss: the prompt and the padding."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Demonstrations packed into rows [R, T]; positions restart at 0, so that none sees another."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    """The next token, or IGNORED."""


def draw_demonstrations(rng: random.Random, recipe: Recipe, n: int) -> list[tuple[list[int], list[int]]]:
    """Draw `n` pairs of prompt ids and answer ids, the answer ending in the end-of-sequence token."""
    pairs = []
    for _ in range(n):
        a, b = sample_problem(rng, recipe.digits)
        answer = demonstration(rng, a, b, direct_fraction=recipe.direct_fraction, error=recipe.error)
        pairs.append((encode(format_prompt(a, b)), [*encode(answer), EOS_ID]))
    return pairs


def pack(pairs: list[tuple[list[int], list[int]]], row_length: int) -> PackedBatch:
    """Pack demonstrations into as few rows as best-fit-decreasing finds.

    Raises:
        ValueError: a demonstration is longer than a row.
    """
    # The last token of a demonstration is only ever a target, so it needs no place in the row.
    rows: list[list[tuple[list[int], list[int]]]] = []
    space: list[int] = []
    for pair in sorted(pairs, key=lambda p: -len(p[0]) - len(p[1])):
        need = len(pair[0]) + len(pair[1]) - 1
        if need > row_length:
            raise ValueError(f"a demonstration needs {need} tokens, but row_length is {row_length}; raise it")
        fits = [i for i, free in enumerate(space) if free >= need]
        if fits:
            row = min(fits, key=space.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            space.append(row_length)
        rows[row].append(pair)
        space[row] -= need
    inputs, positions, targets = [], [], []
    for row_pairs, free in zip(rows, space, strict=True):
        ids: list[int] = []
        where: list[int] = []
        goal: list[int] = []
        for prompt, answer in row_pairs:
            ids += [*prompt, *answer[:-1]]
            where += range(len(prompt) + len(answer) - 1)
            goal += [IGNORED] * (len(prompt) - 1) + answer
        inputs.append(ids + [PAD_ID] * free)
        positions.append(where + list(range(free)))
        targets.append(goal + [IGNORED] * free)
    return PackedBatch(
        input_ids=torch.tensor(inputs), position_ids=torch.tensor(positions), targets=torch.tensor(targets)
    )
