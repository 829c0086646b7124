"""Responses with wrong fields: the parser returns a sound record or raises one of our errors that names the request."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_ext.adapters.sglang import parse_response
from mismatch_ext.adapters.sglang import response as parsing

from mismatch_ext.errors import MismatchError, RoutingError
from mismatch_ext.records import RolloutRecord
from tests.unit.sglang_recorded import PROMPT, RECORDED, SHAPE, WRONG, encoded, provenance, recorded, response, routes

WHICH = st.integers(0, len(WRONG) - 1)
CORPUS = [
    (prompt, output)
    for name in RECORDED
    for prompt, output in zip(*recorded(name), strict=True)
] + [(PROMPT, response())]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to everything inside a response, itself included."""
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            found += places(value[index], (*path, index))
    return found


def change(output: Any, path: tuple[Any, ...], kind: str, wrong: Any) -> Any:
    """Change one place of a response, in place, and return the response; a place that is gone stays so."""
    if not path:
        return wrong
    holder = now = output
    for key in path:
        holder = now
        if not isinstance(holder, (list, dict)):
            return output
        try:
            now = holder[key]
        except (KeyError, IndexError, TypeError):
            return output
    if kind == "drop":
        del holder[path[-1]]
    elif kind == "double" and isinstance(holder, list):
        holder.insert(path[-1], now)
    elif kind == "empty" and isinstance(now, (str, list, dict, int, float)):
        holder[path[-1]] = type(now)()
    elif kind == "halve" and isinstance(now, (str, list)):
        holder[path[-1]] = now[: len(now) // 2]
    else:
        holder[path[-1]] = copy.deepcopy(wrong)
    return output


def attempt(output: Any, prompt: list[int], **changes: Any) -> RolloutRecord | None:
    """Parse; return None when one of our errors was raised, with a message that names the request."""
    arguments: dict[str, Any] = {"prompt_ids": prompt, "provenance": provenance(), "shape": SHAPE, "request_id": "r9"}
    arguments |= changes
    try:
        found = parse_response(output, **arguments)
    except RoutingError:
        return None
    except MismatchError as error:
        assert len(str(error)) < 1500 and "r9" in str(error)
        return None
    # What is read all at once is what is read token by token.
    with mock.patch.object(parsing, "_usual", lambda *_: None):
        assert parse_response(output, **arguments).rollout_logprobs == found.rollout_logprobs
    return found


def sound(record: RolloutRecord | None, prompt: list[int], start: int = 0) -> None:
    """Check what any record must hold, however it came about."""
    if record is None:
        return
    assert record.prompt_ids == tuple(prompt)
    assert len(record.response_ids) == len(record.rollout_logprobs) == len(record.response_mask)
    assert all(type(token) is int and 0 <= token < 2**31 for token in record.response_ids)
    assert all(type(value) is float and -1e38 < value <= 1e-3 for value in record.rollout_logprobs)
    assert record.finish_reason in ("stop", "length")
    assert record.routing is not None and record.routing.rows == max(
        len(prompt) + len(record.response_ids) - 1 - start, 0
    )
    assert record.routing.start == start
    pairs = record.routing.experts.long()
    assert bool((pairs < 8).all())
    assert bool((pairs[..., 0] != pairs[..., 1]).all())


def test_recorded_answers_are_read_all_at_once() -> None:
    for _, output in CORPUS:
        assert parsing._usual(output["meta_info"]["output_token_logprobs"], tuple(output["output_ids"])) is not None


KINDS = ("replace", "replace", "drop", "double", "empty", "halve")
EDITS = st.lists(st.tuples(st.integers(0), st.sampled_from(KINDS), WHICH), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(CORPUS) - 1), EDITS)
def test_any_places_of_a_response_may_hold_anything(row: int, edits: list[tuple[int, str, int]]) -> None:
    prompt, original = CORPUS[row]
    output, paths = copy.deepcopy(original), places(original)
    for place, kind, which in edits:
        output = change(output, paths[place % len(paths)], kind, WRONG[which])
        if not isinstance(output, dict):
            break
    sound(attempt(output, prompt), prompt)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_place_of_a_response_may_hold_every_wrong_value(kind: str) -> None:
    original = response(
        weight_versions=[{"version": "v7", "start": 0, "end": 3}], input_token_logprobs=[[None, 11, None]]
    )
    for wrong in WRONG if kind == "replace" else WRONG[:1]:
        for path in places(original):
            output = change(copy.deepcopy(original), path, kind, wrong)
            sound(attempt(output, PROMPT), PROMPT)
            attempt(output, PROMPT, shape=None, allow_abort=True, weight_version="v7")


@given(st.integers(0, 6), st.integers(0, 8))
def test_routes_of_any_length_from_any_start(rows: int, start: int) -> None:
    record = attempt(response(routed_experts=encoded(routes(rows))), PROMPT, routed_experts_start=start)
    # Four tokens and three have six rows; a server that ignores the start sends all of them.
    assert (record is not None) == (start <= 4 and rows in (6, 6 - start))
    sound(record, PROMPT, start)
