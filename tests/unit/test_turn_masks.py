"""Sampling masks of rows, from the calls that sampled their tokens."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mismatch_ext.errors import RecordError
from mismatch_ext.sampling_mask import TokenSupport
from mismatch_ext.turns import Calls, Trained, masks_of
from tests.unit.test_turns import (
    MASK,
    PROMPT,
    ROW,
    SAMPLED,
    TOOLS,
    RolloutRecord,
    shortened,
    turn,
    turns,
    whole,
)


def masked(
    found: list[RolloutRecord], one: Trained, others: Mapping[int, TokenSupport | None] | None = None
) -> list[list[int]]:
    calls = Calls()
    for number, record in enumerate(found):
        support = (others or {}).get(number, record.support)
        calls.add(record.prompt_ids, record.response_ids, None, support)
    support = masks_of("0", one, calls)
    return [support.slice(place, place + 1).ids.tolist() for place in range(len(support))]


def test_a_row_has_the_mask_of_each_token_that_a_call_has_sampled() -> None:
    # Each call's are 0 and the token, and a tool's tokens have none.
    wanted = [[0, token] if own else [] for token, own in zip(ROW, MASK, strict=True)]
    assert masked(turns(), whole()) == wanted
    assert masked([*reversed(turns())], whole()) == wanted
    assert masked(turns(), shortened(9)) == wanted[:9]
    other = turn(tuple(turns()[1].prompt_ids.tolist()), (19,), 8)  # another candidate for a turn
    assert masked([other, *turns()], whole()) == wanted
    # A token that a builder takes out, and the next message's first in its place.
    first, second = turn(PROMPT, (3, 4, 5), 0), turn((*PROMPT, 3, 4, 11), (6,), 1)
    row = Trained(prompt_ids=PROMPT, response_ids=(3, 4, 11, 6), response_mask=(True, True, False, True))
    assert masked([first, second], row) == [[0, 3], [0, 4], [], [0, 6]]


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [((5, 6), (-1.0, -2.0)), ((5, 7), (-1.5, -2.5))],  # other tokens; the same tokens by other weights
)
def test_of_two_calls_with_one_prompt_the_mask_is_that_of_the_one_that_the_row_is_of(
    tokens: tuple[int, ...], logprobs: tuple[float, ...]
) -> None:
    row = Trained(prompt_ids=PROMPT, response_ids=(5, 7), response_mask=(True, True), rollout_logprobs=(-1.0, -2.0))
    calls = Calls()
    calls.add(PROMPT, tokens, logprobs, TokenSupport.from_lists([(5, 9), tokens[1:]], 20))
    calls.add(PROMPT, (5, 7), (-1.0, -2.0), TokenSupport.from_lists([(4, 5), (7,)], 20))
    assert masks_of("0", row, calls).ids.tolist() == [4, 5, 7]


def test_a_row_whose_prompt_holds_earlier_turns_has_the_masks_of_its_own() -> None:
    # As a loop does that returns each turn as an output.
    first = len(PROMPT) + len(SAMPLED[0]) + len(TOOLS[0])
    row = Trained(
        prompt_ids=(*PROMPT, *SAMPLED[0], *TOOLS[0]),
        response_ids=SAMPLED[1],
        response_mask=(True, True),
        rollout_logprobs=None,
    )
    assert len(row.prompt_ids) == first and masked(turns(), row) == [[0, token] for token in SAMPLED[1]]


@pytest.mark.parametrize(
    ("count", "others", "words"),
    [
        (0, {}, "completion 0: no call of the engine has sampled its tokens"),
        (3, {1: None}, "completion 0: the engine sent no sampling masks"),
        (2, {}, "rollout 0, token 8 .id 8.: not among the 0 tokens of its sampling mask"),
        (
            3,
            {0: TokenSupport.from_lists([(0, 3), (0, 1), (0, 5)], 20)},
            "rollout 0, token 1 .id 4.: not among the 2 tokens of its sampling mask",
        ),
    ],
)
def test_a_token_of_the_policy_without_its_mask_is_named(
    count: int, others: dict[int, TokenSupport | None], words: str
) -> None:
    with pytest.raises(RecordError, match=words):
        masked(turns(count), whole(), others)
