"""Chat prompts for a real model: questions with one right answer from `reasoning-gym`, and open requests.

The questions count legs and letters, and are short word problems. `make real` installs reasoning-gym, which makes them without a
model hub. Open requests ask for longer and freer text; they have no right answer.
"""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

from datasets import Dataset

INSTALL = "pip install -r requirements/real.txt"
KINDS = ("leg_counting", "letter_counting", "gsm_symbolic")
"""Data sets of reasoning-gym whose answers are numbers."""
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


def questions(count: int, seed: int) -> list[Row]:
    """Return questions with their answers, an equal number of each kind.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed; the questions need it. Run: {INSTALL}") from error
    of_kind = -(-count // len(KINDS))
    made = [reasoning_gym.create_dataset(kind, size=of_kind, seed=seed) for kind in KINDS]
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


def evaluation_sets(count: int) -> dict[str, Dataset]:
    """Return questions with one right answer, and open requests."""
    return {
        "questions": Dataset.from_list(questions(count, seed=1)),
        "open": Dataset.from_list(requests(count, seed=2)),
    }


def reward(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """Return 1 for each answer whose last number is the right one, and 0 for others and for open requests."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", completion[0]["content"].replace(",", ""))
        rewards.append(float(bool(numbers) and numbers[-1] == right))
    return rewards
