"""Chat prompts of the real model's runs: open requests differ, and an answer is judged by its last number."""

from __future__ import annotations

import pytest

from examples.chat import REQUESTS, THINGS, chat, nearness, requests, reward


def test_open_requests_are_drawn_once_each_and_the_same_each_time() -> None:
    rows = requests(16, seed=2)
    assert rows == requests(16, seed=2) != requests(16, seed=3)
    assert len({row["prompt"][0]["content"] for row in rows}) == 16
    with pytest.raises(ValueError, match=f"there are {len(REQUESTS) * len(THINGS)}. Ask for fewer"):
        requests(len(REQUESTS) * len(THINGS) + 1, seed=2)


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        ("5 + 7 is 12.", "12", 1.0),
        ("It is 1,234", "1234", 1.0),
        ("12, I think, or 13", "12", 0.0),
        ("none", "12", 0.0),
        ("Once upon a time", "", 0.0),
        ("-4", "-4", 1.0),
    ],
)
def test_an_answer_is_judged_by_its_last_number(text: str, right: str, expected: float) -> None:
    assert reward([chat(text)], [right]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"), [("12", 1.0), ("2 + 10 = 11", 0.9), ("15.5", 0.65), ("0", 0.0), ("40", 0.0), ("twelve", 0.0)]
)
def test_a_graded_answer_earns_less_the_farther_it_is_off(text: str, expected: float) -> None:
    assert nearness([chat(text)], ["12"]) == pytest.approx([expected])
