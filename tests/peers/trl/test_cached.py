"""How many prompt tokens of each completion came from the prefix cache, as TRL's records say; no engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mismatch_ext.adapters.trl.generation import _cached_tokens, _of_completions


def output(cached: int | None, *completions: list[int]) -> Any:
    of = [SimpleNamespace(token_ids=ids, finish_reason="stop") for ids in completions]
    return SimpleNamespace(num_cached_tokens=cached, outputs=of)


def test_each_completion_has_its_requests_count_in_the_order_of_trls_answer() -> None:
    first, second = [1, 2], [3]
    outputs = [output(0, first), output(32, second)]
    assert _of_completions(outputs, [second, first], _cached_tokens) == [32, 0]
    # Copies of the tokens, in the engine's order.
    assert _of_completions(outputs, [[1, 2], [3]], _cached_tokens) == [0, 32]
    assert _of_completions(outputs, [[1, 2], [4]], _cached_tokens) is None
