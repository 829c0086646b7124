"""Chat prompts for a real model: questions with one right answer from `reasoning-gym`, and open requests.

The questions count legs and letters, and are short word problems. `make real` installs reasoning-gym, which makes them without a
model hub. Open requests ask for longer and freer text; they have no right answer. Sums have short
answers, and are for runs that learn.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import Any

from datasets import Dataset

INSTALL = "pip install -c requirements/constraints-cpu.txt -r requirements/real.txt"
KINDS = ("leg_counting", "letter_counting", "gsm_symbolic")
"""Data sets of reasoning-gym whose answers are numbers."""
SUMS = {
    "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"],
    "allow_parentheses": False, "allow_negation": False,
}  # fmt: skip
"""What makes reasoning-gym's `basic_arithmetic` a sum of two numbers from 0 to 10."""
SEEDS_APART = 1_000_000
REQUESTS = (
    "Write a short story about {}.",
    "List three facts about {}.",
    "Explain to a child what {} is.",
    "Write a poem of four lines about {}.",
    "Describe {} to somebody who has never seen it.",
    "Why do people like {}? Answer in two sentences.",
)
THINGS = (
    "a whale", "a river", "a castle", "a robot", "a train", "the moon", "a garden", "a library", "a storm", "a bridge",
    "an island", "a violin", "a market", "a mountain", "a lighthouse", "bread", "chess", "snow", "a telescope", "a bicycle",
)  # fmt: skip

Row = dict[str, Any]


def chat(content: str) -> list[dict[str, str]]:
    """Return a conversation of one user message."""
    return [{"role": "user", "content": content}]


def made_by_gym(kind: str, count: int, seed: int, **settings: object) -> Any:
    """Return a data set of reasoning-gym.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed; the questions need it. Run: {INSTALL}") from error
    return reasoning_gym.create_dataset(kind, size=count, seed=seed, **settings)


def questions(count: int, seed: int) -> list[Row]:
    """Return questions with their answers, an equal number of each kind."""
    of_kind = -(-count // len(KINDS))
    made = [made_by_gym(kind, of_kind, seed) for kind in KINDS]
    mixed = itertools.chain.from_iterable(zip(*made, strict=True))
    rows = [{"prompt": chat(one["question"].strip()), "answer": str(one["answer"])} for one in mixed]
    return rows[:count]


def requests(count: int, seed: int) -> list[Row]:
    """Return open requests, whose answer is an empty text.

    Raises:
        ValueError: More are asked for than there are.
    """
    made = [request.format(thing) for request in REQUESTS for thing in THINGS]
    if count > len(made):
        raise ValueError(f"{count} open requests are asked for, but there are {len(made)}. Ask for fewer prompts.")
    random.Random(seed).shuffle(made)
    return [{"prompt": chat(content), "answer": ""} for content in made[:count]]


def problems(count: int, seed: int) -> Dataset:
    """Return questions to train on."""
    return Dataset.from_list(questions(count, seed))


def sums(count: int, seed: int) -> Dataset:
    """Return sums of two numbers from 0 to 10 to train on, of which there are 121; more rows begin with the same ones.

    A solved sum stands before each, so that an answer is a number and few tokens long.
    """
    # reasoning-gym seeds its n-th row with seed + n, so that near seeds would share rows.
    made = made_by_gym("basic_arithmetic", count, SEEDS_APART * (1 + seed), **SUMS)
    example = [*chat("Calculate 2 + 3."), {"role": "assistant", "content": "5"}]
    first = [{"role": "system", "content": "Answer with a number."}, *example]
    return Dataset.from_list([{"prompt": [*first, *chat(one["question"])], "answer": one["answer"]} for one in made])


def evaluation_sets(count: int) -> dict[str, Dataset]:
    """Return questions with one right answer, and open requests."""
    return {
        "questions": Dataset.from_list(questions(count, seed=1)),
        "open": Dataset.from_list(requests(count, seed=2)),
    }


def last_number(completion: Any) -> str | None:
    """Return the last number of an answer; None if it has none."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completion[0]["content"].replace(",", ""))
    return numbers[-1] if numbers else None


def reward(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """Return 1 for each answer whose last number is the right one, and 0 for others and for open requests."""
    given = [last_number(completion) for completion in completions]
    return [float(number is not None and number == right) for number, right in zip(given, answer, strict=True)]


def nearness(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """Return 1 for each answer whose last number is the right one, a tenth less for each unit that it is off, and at least 0."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        number = last_number(completion)
        off = math.inf if number is None else abs(float(number) - float(right))
        rewards.append(max(0.0, 1 - off / 10))
    return rewards
