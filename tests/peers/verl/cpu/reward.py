"""A reward in the signature that verl calls."""

from __future__ import annotations

from typing import Any


def digit_share(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return the share of digits: an untrained model's answers differ in it, so that there is an advantage."""
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)


def even_share(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Return the share of characters with an even code, which varies between answers of any text."""
    return sum(ord(character) % 2 == 0 for character in solution_str) / max(len(solution_str), 1)
