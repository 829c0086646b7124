"""Hostile responses: the parser returns a sound record or raises one of our errors, in bounded memory, whatever it is given."""

from __future__ import annotations

import base64
import copy
import json
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_ext.adapters.sglang import RoutingShape, parse_response, to_records
from mismatch_ext.adapters.sglang import response as parsing
from mismatch_ext.adapters.sglang.fields import brief

from mismatch_ext.errors import MismatchError, RecordError, RoutingError
from mismatch_ext.records import RolloutRecord
from tests.unit.sglang_recorded import HOSTILE, PROMPT, RECORDED, SHAPE, encoded, provenance, recorded, response, routes

WHICH = st.integers(0, len(HOSTILE) - 1)
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


def fresh(value: Any, levels: int = 2) -> Any:
    """Return a copy of lists and objects, so that one example does not change the next one's values."""
    if not levels or not isinstance(value, (list, dict)):
        return value
    inner = enumerate(value) if isinstance(value, list) else value.items()
    pairs = [(key, fresh(held, levels - 1)) for key, held in inner]
    return dict(pairs) if isinstance(value, dict) else [held for _, held in pairs]


def change(output: Any, path: tuple[Any, ...], kind: str, hostile: Any) -> Any:
    """Change one place of a response, in place, and return the response; a place that is gone stays so."""
    if not path:
        return hostile
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
        holder[path[-1]] = fresh(hostile)
    return output


def attempt(output: Any, prompt: list[int], **changes: Any) -> RolloutRecord | None:
    """Parse; return None when one of our errors was raised, with a message of bounded length that names the request."""
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


@settings(max_examples=1200, deadline=None)
@given(st.integers(0, len(CORPUS) - 1), EDITS)
def test_any_places_of_a_response_may_hold_anything(row: int, edits: list[tuple[int, str, int]]) -> None:
    prompt, original = CORPUS[row]
    output, paths = copy.deepcopy(original), places(original)
    for place, kind, which in edits:
        output = change(output, paths[place % len(paths)], kind, HOSTILE[which])
        if not isinstance(output, dict):
            break
    sound(attempt(output, prompt), prompt)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_place_of_a_response_may_hold_every_hostile_value(kind: str) -> None:
    original = response(
        weight_versions=[{"version": "v7", "start": 0, "end": 3}], input_token_logprobs=[[None, 11, None]]
    )
    for hostile in HOSTILE if kind == "replace" else HOSTILE[:1]:
        for path in places(original):
            output = change(copy.deepcopy(original), path, kind, hostile)
            sound(attempt(output, PROMPT), PROMPT)
            attempt(output, PROMPT, shape=None, allow_abort=True, weight_version="v7")


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_a_batch_may_be_anything(index: int) -> None:
    for outputs in (HOSTILE[index], [HOSTILE[index]]):
        with pytest.raises(MismatchError) as error:
            to_records(outputs, prompt_ids=[PROMPT], provenance=provenance())
        assert len(str(error.value)) < 1500


KEYS = [
    "meta_info", "output_ids", "finish_reason", "type", "prompt_tokens", "output_token_logprobs", "routed_experts", "error",
    "weight_version", "weight_versions", "version", "id", "completion_tokens", "input_token_logprobs",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(JSON, st.binary(max_size=200), st.integers(0, 8))
def test_json_that_has_only_the_names_in_common(value: Any, raw: bytes, start: int) -> None:
    sound(attempt(value, PROMPT), PROMPT)
    meta = {"finish_reason": {"type": "stop"}, "routed_experts": base64.b64encode(raw).decode()}
    sound(attempt({"output_ids": [], "meta_info": meta}, PROMPT, routed_experts_start=start), PROMPT, start)
    sound(attempt(response() | (value if isinstance(value, dict) else {}), PROMPT), PROMPT)


@given(st.integers(0, 6), st.integers(0, 8))
def test_routes_of_any_length_from_any_start(rows: int, start: int) -> None:
    record = attempt(response(routed_experts=encoded(routes(rows))), PROMPT, routed_experts_start=start)
    # Four tokens and three have six rows; a server that ignores the start sends all of them.
    assert (record is not None) == (start <= 4 and rows in (6, 6 - start))
    sound(record, PROMPT, start)


def test_base64_cut_anywhere_is_refused() -> None:
    text = encoded(routes(6))
    for at in range(len(text)):
        for bad in (
            text[:at],
            text[:at] + text[at + 1 :],
            text[:at] + "*" + text[at + 1 :],
            text[:at] + text[at] + text[at:],
        ):
            with pytest.raises(RoutingError, match="request r9, meta_info.routed_experts: "):
                parse_response(
                    response(routed_experts=bad),
                    prompt_ids=PROMPT,
                    provenance=provenance(),
                    shape=SHAPE,
                    request_id="r9",
                )


@given(st.integers(0, 127), st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"))
def test_a_changed_character_gives_other_routes_or_an_error(at: int, letter: str) -> None:
    text = encoded(routes(6))
    sound(attempt(response(routed_experts=text[:at] + letter + text[at + 1 :]), PROMPT), PROMPT)


def peak(call: Callable[[], Any]) -> int:
    """Return the bytes that a call allocates at most, after a first call that fills caches."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


SLACK = 200_000


def test_a_length_that_is_wrong_is_refused_before_anything_is_decoded() -> None:
    text = "A" * 40_000_000
    assert peak(lambda: attempt(response(routed_experts=text), PROMPT)) < SLACK
    assert peak(lambda: attempt(response(routed_experts=bytes(20_000_000)), PROMPT)) < SLACK + 20_000_000


@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens", "output_token_logprobs_length"])
@pytest.mark.parametrize("claim", [2**31 - 1, 2**62, 10**4000, 1e300])
def test_counts_that_a_server_claims_allocate_nothing(field: str, claim: Any) -> None:
    assert peak(lambda: attempt(response(**{field: claim}), PROMPT)) < SLACK


def test_quoting_a_value_copies_little_of_it() -> None:
    for value in (bytes(10**7), bytearray(10**7), "x" * 10**7, [0] * 10**6, dict.fromkeys(range(1000), bytes(10**6))):
        assert peak(lambda: brief(value)) < SLACK  # noqa: B023 - called at once


def test_a_shape_that_implies_terabytes_allocates_nothing() -> None:
    shape = RoutingShape(num_layers=10**9, layers=(0, 10**9 - 1), num_experts=65536, top_k=65536)
    assert peak(lambda: attempt(response(), PROMPT, shape=shape)) < SLACK


@pytest.mark.parametrize("kind", ["good", "out of range", "zeros", "duplicates", "no base64"])
def test_memory_is_a_small_multiple_of_the_routes(kind: str) -> None:
    rows = 60_000
    ids = routes(rows)
    if kind != "good":
        ids = {"out of range": ids + 10**6, "zeros": ids * 0, "duplicates": ids * 0 + 3}.get(kind, ids).astype(np.int32)
    text = encoded(ids) if kind != "no base64" else "*" * len(encoded(ids))
    prompt = list(range(rows - 2))
    # To name the first bad id, the check lists the places of all of them.
    allowed = 3 if kind in ("good", "no base64") else 5
    output = response(routed_experts=text, drop="prompt_tokens")
    used = peak(lambda: attempt(output, prompt))
    # The prompt's tuple and the record's checks hold 8 bytes per token, a few times over.
    assert used < allowed * len(text) + 5 * 8 * rows + SLACK
    assert (attempt(output, prompt) is not None) == (kind == "good")


def test_memory_is_a_small_multiple_of_the_tokens() -> None:
    tokens = 20_000
    entries = [[-1.0, 300 + token, None] for token in range(tokens)]
    output = response(
        [300 + token for token in range(tokens)],
        output_token_logprobs=entries,
        output_token_logprobs_length=tokens,
        completion_tokens=tokens,
    )
    sent = len(json.dumps(output))
    assert peak(lambda: attempt(output, PROMPT, shape=None)) < 4 * sent
    assert attempt(output, PROMPT, shape=None) is not None


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_a_value_of_any_kind_and_size_is_quoted_shortly(index: int) -> None:
    value = HOSTILE[index]
    assert 0 < len(brief(value)) <= 123
    assert len(brief([value] * 10**5)) <= 123
    assert len(brief({"a": {"b": value}})) <= 123


def test_the_fuzzer_can_fail() -> None:
    prompt, output = CORPUS[0]
    record = attempt(output, prompt)
    assert record is not None
    sound(record, prompt)
    with pytest.raises(AssertionError):
        sound(record, prompt[1:])
    with pytest.raises(RecordError, match="output_ids"):
        parse_response({"meta_info": output["meta_info"]}, prompt_ids=prompt, provenance=provenance())
