"""Rows held to the calls that sampled them: what each fault is called, and what is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mismatch_ext.errors import ProvenanceError
from mismatch_ext.turns import Calls, Trained, expect_sampled
from tests.unit.test_turns import FAULTS, MASK, PROMPT, ROW, RolloutRecord, shortened, turn, turns, whole

# Of a row without a record: not of what only records hold, nor of an answer that ends before it has all turns.
ELSEWHERE = {"the last turn is left out", "the end of a turn is left out", "settings change", "nothing was sampled"}
NAMED = [name for name in FAULTS if name not in ELSEWHERE and "has no" not in name]


def calls_of(found: list[RolloutRecord]) -> Calls:
    calls = Calls()
    for one in found:
        calls.add(one.prompt_ids, one.response_ids, one.rollout_logprobs, one.provenance.weight_version)
    return calls


def check(found: list[RolloutRecord], one: Trained, *, one_version: bool = True) -> None:
    expect_sampled("0", one, calls_of(found), one_version=one_version)


@pytest.mark.parametrize("name", NAMED)
def test_what_is_wrong_is_named_as_it_is_of_records(name: str) -> None:
    make, kind, words = FAULTS[name]
    found, one = make()
    with pytest.raises(kind) as refusal:
        check(found, one)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_calls_are_kept_as_what_they_add() -> None:
    other = turn((*PROMPT, 9), (4,), 1)  # about something else, between two turns
    found = [*turns(2), other, turns()[2]]
    kept = list(calls_of(found))
    assert [(one.prompt_ids, one.response_ids) for one in kept] == [(one.prompt_ids, one.response_ids) for one in found]
    check(found, whole())


def test_what_leads_to_no_token_of_the_row_is_left_out() -> None:
    check(turns(), shortened(5))  # the first turn and its tool alone
    check(turns(), shortened(9))  # cut off within the last turn
    check(turns(), whole(response_mask=(False,) * len(ROW)))
    check([turn(turns()[1].prompt_ids, (19,), 8), *turns()], whole())  # another candidate for a turn


def test_a_last_token_that_a_builder_takes_out_is_no_fault() -> None:
    # As verl does where a stop token is also the next message's first: no later turn is given it, and it is not trained on.
    first, second = turn(PROMPT, (3, 4, 5), 0), turn((*PROMPT, 3, 4, 11), (6,), 1)
    row = Trained(prompt_ids=PROMPT, response_ids=(3, 4, 11, 6), response_mask=(True, True, False, True))
    check([first, second], row)


def test_the_same_tokens_sampled_twice_have_either_log_probability() -> None:
    again = replace(turns()[0], rollout_logprobs=(-9.0, -9.0, -9.0))
    for found in ([again, *turns()], [*turns(), again]):
        check(found, whole())


def test_versions_may_differ_where_the_host_is_asynchronous() -> None:
    found, one = FAULTS["weights change"][0]()
    check(found, one, one_version=False)
    with pytest.raises(ProvenanceError, match="turn 2 by weight version 4"):
        check(found, one)
    # Of a turn that the row has no counted token of, the version is nothing to it.
    check(found, whole(response_mask=(*MASK[:8], False, False, False)))


def test_log_probabilities_that_nobody_has_are_not_compared() -> None:
    calls = Calls()
    for one in turns():
        calls.add(one.prompt_ids, one.response_ids, None, 3)
    expect_sampled("0", whole(), calls, one_version=True)
    check(turns(), whole(rollout_logprobs=None))
