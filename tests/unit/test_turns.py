"""Turns joined to completions: which experts win, what is masked, and what each fault is called."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from mismatch_ext.bad_rows import Fault
from mismatch_ext.errors import MismatchError, RecordError, RoutingError
from mismatch_ext.rollout import Provenance, RolloutRecord, SamplingSettings
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.sampling_mask import TokenSupport
from mismatch_ext.turns import Trained, any_asked, join_turns

HERE = Provenance(
    engine="vllm", engine_version="0", dtype="float32", kv_cache_dtype=None, weight_version=3, patch_digest="none",
    sampling=SamplingSettings(), logprobs_mode="processed_logprobs",
)  # fmt: skip
PROMPT = (1, 2)
SAMPLED = ((3, 4, 5), (6, 7), (8, 9, 10))
TOOLS = ((11, 12), (13,))
ROW = (*SAMPLED[0], *TOOLS[0], *SAMPLED[1], *TOOLS[1], *SAMPLED[2])
MASK = (True,) * 3 + (False,) * 2 + (True,) * 2 + (False,) + (True,) * 3


def trace(tokens: tuple[int, ...], number: int) -> RoutingTrace:
    """Return routes of all tokens but the last, two experts of eight in a layer: the second names the turn."""
    rows = torch.tensor([[[0, number + 1]]] * (len(tokens) - 1), dtype=torch.uint8)
    return RoutingTrace(parts=(rows,), layers=(1,), num_experts=8, versions=((0, 3),)).of_tokens(tokens)


def turn(prompt: tuple[int, ...], response: tuple[int, ...], number: int, **other: object) -> RolloutRecord:
    """Return what one call of an engine came to."""
    given: dict[str, object] = {
        "prompt_ids": prompt, "response_ids": response, "response_mask": (True,) * len(response),
        "rollout_logprobs": tuple(-number - token / 100 for token in response), "finish_reason": "stop", "provenance": HERE,
        "routing": trace(prompt + response, number),
        "support": TokenSupport.from_lists([(0, token) for token in response], 20), **other,
    }  # fmt: skip
    return RolloutRecord(**given)  # type: ignore[arg-type]


def turns(count: int = 3) -> list[RolloutRecord]:
    """Return the turns of the completion."""
    found, prompt = [], PROMPT
    for number, sampled in enumerate(SAMPLED[:count]):
        found.append(turn(prompt, sampled, number))
        prompt = prompt + sampled + (TOOLS[number] if number < len(TOOLS) else ())
    return found


def whole(**other: object) -> Trained:
    """Return the completion as it is trained on."""
    logprobs = tuple(value for number, one in enumerate(SAMPLED) for value in (-number - token / 100 for token in one))
    values = iter(logprobs)
    kept = tuple(next(values) if sampled else 0.0 for sampled in MASK)
    given = {"prompt_ids": PROMPT, "response_ids": ROW, "response_mask": MASK, "rollout_logprobs": kept, **other}
    return Trained(**given)  # type: ignore[arg-type]


def shortened(length: int) -> Trained:
    """Return a completion of the first tokens alone."""
    return whole(response_ids=ROW[:length], response_mask=MASK[:length], rollout_logprobs=None)


def test_a_token_keeps_the_experts_that_it_was_sampled_with() -> None:
    joined = join_turns(turns(), [whole()])
    (record,) = joined.records
    assert record.response_ids.tolist() == list(ROW) and record.response_mask.tolist() == list(MASK)
    assert np.array_equal(record.rollout_logprobs, whole().rollout_logprobs)  # type: ignore[arg-type]
    assert record.routing is not None and record.support is not None
    # The last token of a turn, and the tool's behind it, have the experts of the next turn's prefill.
    experts = record.routing.experts[:, 0, 1].tolist()
    assert experts == [1] * 4 + [2] * 4 + [3] * 4
    assert record.routing.tokens is not None and record.routing.tokens.tolist() == [*PROMPT, *ROW][:-1]
    # Each later turn has routed all earlier tokens anew, by other experts.
    assert (joined.turns, joined.sampled_rows, joined.prefilled_rows, joined.rerouted_rows) == (3, 5, 7, 12)
    assert record.support.counts.tolist() == [2 * kept for kept in MASK]
    assert record.support.slice(5, 6).ids.tolist() == [0, 6]


def test_equal_prefills_are_not_counted_as_others() -> None:
    same = [replace(one, routing=trace(tuple(one.token_ids.tolist()), 0)) for one in turns()]
    assert join_turns(same, [whole()]).rerouted_rows == 0


@pytest.mark.parametrize(("length", "sampled"), [(9, 1), (8, 0)])
def test_a_completion_may_end_within_a_turn_at_the_limit(length: int, sampled: int) -> None:
    joined = join_turns(turns(), [shortened(length)], limit=length)
    (record,) = joined.records
    assert record.response_mask.tolist() == list(MASK[:length]) and record.finish_reason == "length"
    assert record.routing is not None and record.routing.rows == len(PROMPT) + length
    assert (joined.turns, joined.sampled_rows) == (3, 3 + sampled)


def test_turns_find_their_completions() -> None:
    # Equal beginnings, equal completions, one that is the beginning of another, in the order of the calls or of the rows.
    short = Trained(prompt_ids=PROMPT, response_ids=(3,), response_mask=(True,))
    mine, other, third, fourth = turns(), turn(PROMPT, (3,), 5), turn(PROMPT, SAMPLED[0], 6), turns()
    rows = [whole(), short, replace(shortened(3), rollout_logprobs=third.rollout_logprobs), whole()]
    calls = [mine[0], other, third, fourth[0], mine[1], fourth[1], mine[2], fourth[2]]
    for order in (calls, [other, *mine, *fourth, third]):
        joined = join_turns(order, rows)
        assert [len(record.response_ids) for record in joined.records] == [len(ROW), 1, 3, len(ROW)]
        assert joined.turns == 8
        assert np.array_equal(joined.records[1].rollout_logprobs, other.rollout_logprobs)
        assert np.array_equal(joined.records[2].rollout_logprobs, third.rollout_logprobs)


def rendered_again() -> tuple[list[RolloutRecord], Trained]:
    found = turns()
    prompt = list(found[1].prompt_ids)
    prompt[3] = 19
    found[1] = turn(tuple(prompt), SAMPLED[1], 1)
    return found, whole()


def trained_on_other(place: int) -> tuple[list[RolloutRecord], Trained]:
    ids = list(ROW)
    ids[place] = 19
    return turns(), whole(response_ids=tuple(ids), rollout_logprobs=None)


def without(first: int, last: int) -> tuple[list[RolloutRecord], Trained]:
    kept = [place for place in range(len(ROW)) if not first <= place < last]
    ids, mask = (tuple(column[place] for place in kept) for column in (ROW, MASK))
    return turns(), whole(response_ids=ids, response_mask=mask, rollout_logprobs=None)


def of_version(number: int, **other: object) -> tuple[list[RolloutRecord], Trained]:
    found = turns()
    found[number] = replace(found[number], provenance=replace(HERE, **other))  # type: ignore[arg-type]
    return found, whole()


def marked() -> tuple[list[RolloutRecord], Trained]:
    mask = list(MASK)
    mask[4] = True
    return turns(), whole(response_mask=tuple(mask))


def moved() -> tuple[list[RolloutRecord], Trained]:
    assert (kept := whole().rollout_logprobs) is not None
    values = kept.tolist()
    values[5], values[6] = values[6], values[5]
    return turns(), whole(rollout_logprobs=tuple(values))


def bare(field: str) -> tuple[list[RolloutRecord], Trained]:
    first, second, third = turns()
    return [first, replace(second, **{field: None}), third], whole()


FAULTS: dict[str, tuple[Callable[[], tuple[list[RolloutRecord], Trained]], str]] = {
    "an earlier turn is rendered again": (rendered_again, "was given id 19 as token 1 of the completion, where id 4"),
    "a sampled token is another": (lambda: trained_on_other(6), "sampled id 7 as token 6 of the completion"),
    "a tool's token is another": (lambda: trained_on_other(4), "was given id 12 as token 4 of the completion"),
    "a turn is left out": (lambda: without(5, 7), "was given id 6 as token 5 of the completion, where id 13"),
    "the last turn is left out": (lambda: without(8, 11), "a turn was dropped: the engine sampled 3 tokens"),
    "the end of a turn is left out": (lambda: without(10, 11), "sampled id 10 as token 10 of the completion"),
    "weights change": (lambda: of_version(2, weight_version=4), "completion 0, turn 2 has weight_version=4"),
    "settings change": (lambda: of_version(1, sampling=SamplingSettings(temperature=0.5)), "turn 1 has sampling="),
    "a tool's token counts": (marked, "token 4 of the completion (id 12) counts as the policy's, and no call"),
    "log-probabilities move": (moved, "token 5 of the completion is trained with log-probability -1.07"),
    "a turn has no routes": (lambda: bare("routing"), "a turn's routes are missing"),
    "a turn has no masks": (lambda: bare("support"), "a turn has no sampling masks"),
    "nothing was recorded": (lambda: ([], whole()), "sampled it there. Generate by"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_named(name: str) -> None:
    make, words = FAULTS[name]
    found, one = make()
    with pytest.raises(MismatchError, match=re.escape(words)):
        join_turns(found, [one], limit=len(ROW))


def test_a_completion_has_the_fault_of_its_turn() -> None:
    fault = Fault(reason="routes", message="routes of other tokens")
    sampled = turns()
    sampled[1] = replace(sampled[1], routing=None, fault=fault)
    other = Trained(prompt_ids=(9,), response_ids=(4,), response_mask=(True,))
    records = join_turns([*sampled, turn((9,), (4,), 5)], [whole(), other]).records
    assert [record.fault for record in records] == [fault, None]
    assert records[0].response_mask.tolist() == list(MASK)
    assert records[1].routing is not None


def test_the_last_tokens_of_a_tool_have_no_routes() -> None:
    with pytest.raises(RoutingError, match="its last 2 tokens were never given to the engine"):
        join_turns(turns(2), [shortened(8)])
    bare = [replace(one, routing=None) for one in turns(2)]
    assert join_turns(bare, [shortened(8)]).records[0].response_mask.tolist() == list(MASK[:8])


def test_calls_about_something_else_are_left_out() -> None:
    judge, candidate = turn((9, 9, 9), (4,), 7), turn(tuple(turns()[1].prompt_ids.tolist()), (19,), 8)
    with pytest.raises(RecordError, match="a turn was dropped"):
        join_turns([*turns(), judge], [whole()])
    joined = join_turns([*turns(), judge, candidate], [whole()], every_turn=False)
    assert joined.turns == 3
    # One that goes on from the completion is none.
    with pytest.raises(RecordError, match="a turn was dropped"):
        join_turns(turns(), [shortened(5)], every_turn=False)


def test_something_else_has_sampled_what_no_turn_has() -> None:
    assert any_asked(turns(), [whole()]) and not any_asked([turn((9, 9), (4,), 0)], [whole()])


def test_turns_of_which_no_completion_is_trained_on_are_refused() -> None:
    with pytest.raises(RecordError, match="3 turns were sampled and no completion is trained on"):
        join_turns(turns(), [])
