"""Replay in models that torch.compile has compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing

from tests import traces
from tests.oracles.routing.passes import (
    Pass,
    another,
    backward,
    forward,
    run,
)
from tests.peers.transformers.cases import FAMILIES, QWEN, case, replayed


@pytest.fixture(autouse=True)
def compiling() -> Iterator[None]:
    """Let torch compile, which other tests leave out."""
    with torch._dynamo.config.patch(disable=False):
        yield


def compiled(how: str, experts: str = "batched_mm", **settings: Any) -> Any:
    """Return a model compiled in one of the ways that trainers do it."""
    torch._dynamo.reset()
    model: Any = FAMILIES[QWEN].build(experts=experts)
    for layer in model.model.layers if how == "layers" else ():
        layer.compile(**settings)
    if how == "method":
        model.compile(**settings)
    return torch.compile(model, **settings) if how == "model" else model


@pytest.mark.parametrize(
    "how, experts, backend, reentrant",
    [
        ("layers", "batched_mm", "aot_eager", None),
        ("layers", "batched_mm", "aot_eager", True),
        ("layers", "batched_mm", "aot_eager", False),
        ("model", "batched_mm", "aot_eager", False),
        ("method", "batched_mm", "aot_eager", None),
        # aot_eager itself, without any of our code, sums the gradients of grouped_mm in another order than eager mode.
        ("layers", "grouped_mm", "eager", False),
    ],
)
def test_compiled_models(how: str, experts: str, backend: str, reentrant: bool | None) -> None:
    reference, own, plain = case(QWEN, experts=experts)
    other = another(own)
    expected = replayed(reference, other)
    model = compiled(how, experts, backend=backend)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def same(got: Pass, wanted: Pass) -> bool:
        return Pass(got.logits, {n.removeprefix("_orig_mod."): g for n, g in got.gradients.items()}).same(wanted)

    assert same(run(model), plain)  # compiled before any context: what was compiled then must not be run in one
    for _ in range(2):
        assert same(replayed(model, other), expected)
        assert same(replayed(model, own), plain)
    with record_routing(model) as recording:
        assert same(run(model), plain)
    assert traces.same(recording.trace, own)
    with replay_routing(model, other):
        first = forward(model)[1]
    with replay_routing(model, own):
        second = forward(model)[1]
    assert same(Pass(plain.logits, backward(model, second)), plain)
    assert same(Pass(expected.logits, backward(model, first)), expected)
    assert same(run(model), plain)


def test_a_model_compiled_as_one_graph_is_refused() -> None:
    # Replay needs a break at the router, and fullgraph=True forbids any: torch says so, and nothing runs natively.
    model = compiled("layers", backend="eager", fullgraph=True)
    assert run(model).same(case(QWEN, experts="batched_mm")[2])
    with pytest.raises(torch._dynamo.exc.Unsupported), replay_routing(model, case(QWEN)[1]):
        forward(model)
