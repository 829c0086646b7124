"""Addition with the carries written out: a verifiable task with a real response length.

    prompt    386+47=
    worked    6+7+0=13,8+4+1=13,3+0+1=04:433     one step per digit: digit + digit + carry = two-digit sum
    direct    :433                               no working

Both styles end in `:` and the answer. A model trained on a mixture of them answers some problems in 5 tokens
and others in 50, and reinforcement learning can gain by preferring the worked style.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypedDict

CHARACTERS = "0123456789+=,:"
"""Every character that a prompt or an answer may contain."""

FAMILIAR_DIGITS = (2, 5)
"""Operand lengths that the models are trained on."""

UNFAMILIAR_DIGITS = (6, 8)
"""Longer operands, never trained on: the policy is uncertain there and the mismatch several times larger."""


class Row(TypedDict):
    """One problem as a data set row; `a` and `b` reach the reward function as columns."""

    prompt: str
    a: int
    b: int


def sample_problem(rng: random.Random, digits: tuple[int, int] = FAMILIAR_DIGITS) -> tuple[int, int]:
    """Draw two operands: the longer has a length uniform in `digits`, the other the same or one digit less.

    Args:
        rng: Source of randomness.
        digits: Shortest and longest operand length, inclusive.

    Returns:
        The operands, in random order.
    """
    low, high = digits
    longer = rng.randint(low, high)
    shorter = rng.randint(max(1, longer - 1), longer)
    a, b = (rng.randint(10 ** (n - 1), 10**n - 1) for n in (longer, shorter))
    return (a, b) if rng.random() < 0.5 else (b, a)


def format_prompt(a: int, b: int) -> str:
    """Write the question."""
    return f"{a}+{b}="


def worked_answer(a: int, b: int, rng: random.Random | None = None, step_error: float = 0.0) -> str:
    """Add digit by digit, carries written out, then give the sum.

    Args:
        a, b: operands.
        rng: source of the errors; needed when `step_error` is positive.
        step_error: probability that a step's sum is written wrong. The error is carried on, as a pupil would.

    Returns:
        The answer in the worked style; correct when `step_error` is 0.
    """
    length = max(len(str(a)), len(str(b)))
    digits_a, digits_b = (str(n).zfill(length)[::-1] for n in (a, b))
    steps, result, carry = [], "", 0
    for x, y in zip(digits_a, digits_b, strict=True):
        total = int(x) + int(y) + carry
        if rng is not None and rng.random() < step_error:
            total = (total + rng.choice([-10, -2, -1, 1, 2, 10])) % 20
        steps.append(f"{x}+{y}+{carry}={total:02d}")
        carry, digit = divmod(total, 10)
        result = f"{digit}{result}"
    result = ("1" if carry else "") + result
    return ",".join(steps) + ":" + (result.lstrip("0") or "0")


def direct_answer(a: int, b: int, rng: random.Random | None = None, digit_error: float = 0.0) -> str:
    """Give the sum without working; each digit is replaced by a random one with probability `digit_error`."""
    text = str(a + b)
    if rng is not None:
        text = "".join(str(rng.randint(0, 9)) if rng.random() < digit_error else c for c in text)
    return ":" + text


def demonstration(rng: random.Random, a: int, b: int, *, direct_fraction: float = 0.0, error: float = 0.0) -> str:
    """Draw one training answer: direct with probability `direct_fraction`, else worked, with errors."""
    if rng.random() < direct_fraction:
        return direct_answer(a, b, rng, error)
    return worked_answer(a, b, rng, error)


def score(completion: str, a: int, b: int) -> float:
    """Return 1.0 when what follows the first `:` is exactly the sum in plain decimal notation, else 0.0.

    The comparison is between strings, so that no text a model can write raises or is read generously: a
    second `:`, a sign, blanks, leading zeros, non-ASCII digits and trailing characters all score 0.
    """
    return float(completion.partition(":")[2] == str(a + b))


def reward(completions: Sequence[str], a: Sequence[int], b: Sequence[int], **_: object) -> list[float]:
    """Score a batch of completions: the reward function in the signature TRL calls (columns as keywords)."""
    return [score(text, x, y) for text, x, y in zip(completions, a, b, strict=True)]


def make_dataset(n: int, digits: tuple[int, int] = FAMILIAR_DIGITS, seed: int = 0) -> list[Row]:
    """Draw `n` problems; the same arguments give the same rows.

    Returns:
        Rows for `datasets.Dataset.from_list`.
    """
    rng = random.Random(seed)
    problems = [sample_problem(rng, digits) for _ in range(n)]
    return [Row(prompt=format_prompt(a, b), a=a, b=b) for a, b in problems]
