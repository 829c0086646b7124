"""How agreement is counted, merged and logged, and which routes a model cannot have chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mismatch_ext.errors import RoutingError
from mismatch_ext.names import ROUTING_MEASURES
from mismatch_ext.routing import (
    RoutingTrace,
    agreement,
    agreement_metrics,
    storage_dtype,
)
from mismatch_ext.routing.agreement import no_agreement, of_layer
from mismatch_ext.sums import Sums, merged
from tests.unit.test_routing_trace import routes, trace

LAYERS = (1, 3)


def _of(ids: list[list[list[int]]], experts: int = 8) -> RoutingTrace:
    tensor = torch.tensor(ids).to(storage_dtype(experts))
    return RoutingTrace(parts=(tensor,), layers=LAYERS, num_experts=experts)


def counts(sums: Sums) -> dict[str, int | list[int]]:
    return {name: value.long().tolist() for name, value in sums.items()}


RECORDED = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 7], [1, 6]], [[2, 4], [3, 5]]]
# Token 0: equal. Token 1: layer 1 in another order. Token 2: layer 3 has another expert. Token 3: both layers differ.
NATIVE = [[[0, 1], [2, 3]], [[5, 4], [6, 7]], [[0, 7], [1, 5]], [[2, 3], [4, 6]]]


def test_four_tokens_by_hand() -> None:
    metrics = agreement_metrics(agreement(_of(RECORDED), _of(NATIVE)), LAYERS)
    assert metrics["routing/compared_tokens"] == 4.0 and metrics["routing/set_mismatch_frac"] == 3 / 8
    assert metrics["routing/token_mismatch_frac"] == metrics["routing/order_agreement_frac"] == 0.5
    assert [metrics[f"routing/layer_{layer}_set_mismatch"] for layer in LAYERS] == [0.25, 0.5]
    assert {name for name in metrics if not of_layer(name)} == ROUTING_MEASURES.keys()


def test_ids_of_two_bytes_differ_in_either() -> None:
    low, high = _of([[[0, 1], [2, 3]]], 300), _of([[[256, 1], [2, 3]]], 300)  # 256 = 0 in the low byte
    assert agreement(low, high)["set_mismatches"].tolist() == [1, 0]


def test_rows_without_a_route_are_counted_and_padding_is_not() -> None:
    flags, real = torch.tensor([[1, 0], [0, 1]]), torch.tensor([1, 1, 0, 0])
    sums = agreement(_of(RECORDED), _of(NATIVE), flags, real=real)
    assert [int(sums[name]) for name in ("tokens", "native_rows", "token_mismatches")] == [1, 1, 0]
    assert agreement_metrics(sums, LAYERS)["routing/native_rows_frac"] == 0.5


def test_nothing_compared_does_not_read_as_agreement() -> None:
    sums = agreement(_of(RECORDED), _of(RECORDED), torch.zeros(4))
    assert agreement_metrics(sums, LAYERS) == {"routing/compared_tokens": 0.0, "routing/native_rows_frac": 1.0}
    assert agreement_metrics(no_agreement(LAYERS), LAYERS) == {}
    assert counts(merged(sums, no_agreement(LAYERS))) == counts(sums)


@given(
    rows=st.integers(0, 20), top_k=st.integers(1, 6), experts=st.sampled_from([8, 300]), seed=st.integers(0, 50),
    changed=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 1), st.booleans()), max_size=6), cut=st.integers(0, 20),
)  # fmt: skip
def test_counts_are_those_of_python_sets_and_add_up(
    rows: int, top_k: int, experts: int, seed: int, changed: list[tuple[int, int, bool]], cut: int
) -> None:
    a = routes(rows, 2, top_k, 8, seed)
    b = a.clone()
    for row, layer, reorder in changed:
        if rows:
            b[row % rows, layer] = a[row % rows, layer].flip(0) if reorder else (a[row % rows, layer] + 1) % 8
    mask = torch.arange(rows) % 4 != 3
    one, two = (
        RoutingTrace(parts=(ids.to(storage_dtype(experts)),), layers=LAYERS, num_experts=experts) for ids in (a, b)
    )
    whole = agreement(one, two, mask)
    pairs = [(x, y) for x, y, kept in zip(a.tolist(), b.tolist(), mask.tolist(), strict=True) if kept]
    assert counts(whole) == {
        "passes": 1,
        "tokens": len(pairs),
        "native_rows": rows - len(pairs),
        "token_mismatches": sum(any(set(s) != set(t) for s, t in zip(x, y, strict=True)) for x, y in pairs),
        "set_mismatches": [sum(set(x[layer]) != set(y[layer]) for x, y in pairs) for layer in (0, 1)],
        "order_agreements": [sum(x[layer] == y[layer] for x, y in pairs) for layer in (0, 1)],
    }
    at = min(cut, rows)
    halves = [agreement(one.slice(i, j), two.slice(i, j), mask[i:j]) for i, j in ((0, at), (at, rows))]
    assert counts(merged(*halves)) == {**counts(whole), "passes": 2}


def test_only_the_same_tokens_and_model_are_compared() -> None:
    with pytest.raises(RoutingError, match=r"\(\(1, 3\), 8, 4, 3\) and \(\(1, 3\), 8, 5, 3\) cannot be compared"):
        agreement(trace(4), trace(5))
    with pytest.raises(RoutingError, match="cannot be compared"):
        agreement(trace(4), trace(4, layers=(1, 2)))
