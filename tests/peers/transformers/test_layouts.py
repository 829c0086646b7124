"""Replay of batches as trainers lay them out: padded, packed, without the last row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from torch import Tensor

from mismatch_ext.routing import RoutingTrace, align, align_packed
from tests.oracles.routing.passes import (
    another,
)
from tests.peers.transformers.cases import QWEN, case


def sequences() -> list[Tensor]:
    """Return token sequences of different lengths."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(3, 96, (length,), generator=generator) for length in (7, 12, 4)]


def alone(model: Any, traces: list[RoutingTrace]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the logits of each sequence by itself and the gradients of their summed losses."""
    model.zero_grad()
    outputs = []
    for ids, trace in zip(sequences(), traces, strict=True):
        with replay_routing(model, trace):
            outputs.append(model(input_ids=ids[None], use_cache=False).logits[0])
        outputs[-1].logsumexp(-1).sum().backward()
    return [x.detach() for x in outputs], {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(model: Any, outputs: list[Tensor], traces: list[RoutingTrace]) -> None:
    """Compare logits and gradients with those of each sequence by itself; other shapes of products round otherwise."""
    model.zero_grad()
    torch.stack([x.logsumexp(-1).sum() for x in outputs]).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    expected, expected_gradients = alone(model, traces)
    for got, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)
    for name, wanted in expected_gradients.items():
        torch.testing.assert_close(gradients[name], wanted, rtol=1e-3, atol=1e-4)


def other_routes(model: Any) -> list[RoutingTrace]:
    """Return a routing per sequence, with rows for all of its tokens, that is not the model's own."""
    traces = []
    for ids in sequences():
        with torch.no_grad(), record_routing(model) as recording:
            model(input_ids=ids[None], use_cache=False)
        traces.append(another(recording.trace))
    return traces


@pytest.mark.numeric
@pytest.mark.numeric
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [QWEN, "deepseek_v3"])
def test_padding(name: str, side: str) -> None:
    model = case(name)[0]
    traces = other_routes(model)
    ids, mask = torch.zeros(3, 14, dtype=torch.long), torch.zeros(3, 14, dtype=torch.long)
    places = []
    for row, sequence in enumerate(sequences()):
        first = 14 - len(sequence) if side == "left" else 0
        places.append(slice(first, first + len(sequence)))
        ids[row, places[-1]], mask[row, places[-1]] = sequence, 1
    trace, recorded = align(traces, mask)
    with replay_routing(model, trace, recorded) as replay:
        logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    assert (replay.rows, replay.native_rows) == (42, 42 - 23)
    compare(model, [logits[row, place] for row, place in enumerate(places)], traces)


@pytest.mark.numeric
@pytest.mark.numeric
@pytest.mark.parametrize("name", [QWEN, "deepseek_v3"])
def test_packed_sequences(name: str) -> None:
    model = case(name)[0]
    traces, lengths = other_routes(model), [len(ids) for ids in sequences()]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    trace, recorded = align_packed(traces, lengths)
    assert recorded.all()
    with replay_routing(model, trace, recorded):
        logits = model(input_ids=torch.cat(sequences())[None], position_ids=positions, use_cache=False).logits[0]
    compare(model, list(logits.split(lengths)), traces)


@pytest.mark.numeric
@pytest.mark.numeric
def test_a_missing_last_row_is_routed_natively() -> None:
    # What engines give: the last sampled token has no row. It changes its own logits at most.
    model = case(QWEN)[0]
    whole = other_routes(model)[1]
    ids = sequences()[1][None]
    trace, recorded = align([whole.slice(0, 11)], torch.ones(1, 12))
    with torch.no_grad():
        with replay_routing(model, trace, recorded) as replay:
            got = model(input_ids=ids, use_cache=False).logits[0]
        with replay_routing(model, whole):
            expected = model(input_ids=ids, use_cache=False).logits[0]
    assert replay.native_rows == 1
    torch.testing.assert_close(got[:-1], expected[:-1], rtol=1e-4, atol=1e-5)
    assert (got[-1] - expected[-1]).abs().max() > 1e-3
