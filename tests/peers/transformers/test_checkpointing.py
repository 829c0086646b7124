"""Replay under activation checkpointing: every way to enable it, and backward passes in any order."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from torch import Tensor
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mismatch_ext.errors import ReplayError
from tests.oracles.routing.passes import (
    another,
    backward,
    equal,
    forward,
    run,
    tokens,
    watched,
)
from tests.peers.transformers.cases import FAMILIES, QWEN, REENTRANT, case, replayed


def enable(model: Any, how: str) -> None:
    """Enable checkpointing in one of the ways that trainers do."""
    kind, _, mode = how.partition(" ")
    reentrant = mode == "reentrant"
    if kind == "model":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    elif kind == "context_fn":
        from contextlib import nullcontext

        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": lambda: (nullcontext(), nullcontext())}
        )
    elif kind == "wrapper":  # as FSDP's activation checkpointing does
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

        implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        layers = model.model.layers
        for index in range(len(layers)):
            layers[index] = checkpoint_wrapper(layers[index], checkpoint_impl=implementation)


WAYS = ["model reentrant", "model saved", "context_fn saved", "wrapper reentrant", "wrapper saved"]


@pytest.mark.parametrize(
    "when, way",
    [("before", way) for way in WAYS] + [("inside", way) for way in WAYS if not way.startswith("wrapper")],
)
def test_checkpointing_enabled_before_or_inside_the_context(when: str, way: str) -> None:
    model, (reference, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    trace = another(own)
    expected = replayed(reference, trace)
    if when == "before":
        enable(model, way)
    with replay_routing(model, trace):
        if when == "inside":
            enable(model, way)
        got = run(model)
    assert torch.equal(got.logits, expected.logits)
    renamed = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in got.gradients.items()}
    assert equal(renamed, expected.gradients)


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_the_whole_model_in_one_checkpoint(reentrant: bool) -> None:
    model, own, _ = case(QWEN)
    trace = another(own)
    expected = replayed(model, trace)

    def logits(embedded: Tensor) -> Tensor:
        return model(inputs_embeds=embedded, use_cache=False).logits

    embedded = model.get_input_embeddings()(tokens()).detach().requires_grad_()
    # A checkpoint takes gradients by its inputs, which embeddings have and ids have not.
    with watched(moe_layout(model)) as seen, replay_routing(model, trace, others="replay") as replay:
        output = torch.utils.checkpoint.checkpoint(logits, embedded, use_reentrant=reentrant)
        targets = tokens().roll(-1, 1)[..., None]
        gradients = backward(model, -output.log_softmax(-1).gather(-1, targets).mean())
    assert torch.equal(output, expected.logits) and seen.times() == {2} and replay.forwards == 1
    expected.gradients.pop("model.embed_tokens.weight")
    gradients.pop("model.embed_tokens.weight", None)
    assert equal(gradients, expected.gradients)


@pytest.mark.parametrize("way", ["composable", "foreign"])
def test_checkpoints_that_cannot_be_bound_are_refused_in_the_forward(way: str) -> None:
    model, (_, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    if way == "composable":
        composable_checkpoint(model.model.layers[2])
        message = "layer 2 runs in a checkpoint that is not torch.utils.checkpoint's"
    else:
        # As DeepSpeed's: a function of its own that runs without gradients and recomputes in backward.
        layer = model.model.layers[3]
        plain = layer.forward

        def without(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return plain(*args, **kwargs)

        layer.forward = without
        message = "layer 3 runs in a checkpoint that is not torch.utils.checkpoint's, or without gradients"
    with pytest.raises(ReplayError, match=message), replay_routing(model, own):
        forward(model)
    with record_routing(model) as recording:  # recomputes what it chose itself, whoever does it
        backward(model, forward(model)[1])
    assert recording.trace.same_as(own)


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_backward_passes_of_other_forwards_in_a_context(reentrant: bool) -> None:
    model, (_, own, plain) = FAMILIES[QWEN].build(), case(QWEN)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    other, third = another(own), another(another(own))
    expected = [replayed(model, trace).gradients for trace in (other, third)]
    before = forward(model)[1]
    with replay_routing(model, other):
        first = forward(model)[1]
    with replay_routing(model, third) as replay:
        second = forward(model)[1]
        assert equal(backward(model, before), plain.gradients)
        assert equal(backward(model, first), expected[0])
        assert equal(backward(model, second), expected[1])
    assert replay.forwards == 1
    with record_routing(model) as recording:
        loss = forward(model)[1]
        with pytest.raises(ReplayError, match="already"), replay_routing(model, own):
            pass
        backward(model, loss)
    assert recording.trace.same_as(own)


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_a_backward_pass_in_the_midst_of_a_forward(reentrant: bool) -> None:
    # What is recomputed then is no part of the forward pass that is going on.
    model, (_, own, plain) = FAMILIES[QWEN].build(), case(QWEN)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    expected = replayed(case(QWEN)[0], another(own)).gradients
    with replay_routing(model, another(own)):
        loss = forward(model)[1]
    got: list[dict[str, Tensor]] = []
    handle = model.model.norm.register_forward_hook(lambda *_: None if got else got.append(backward(model, loss)))
    with replay_routing(model, own):
        assert torch.equal(forward(model)[0], plain.logits)
    handle.remove()
    assert equal(got[0], expected)


@pytest.mark.parametrize("reentrant", REENTRANT)
def test_recomputation_in_another_thread(reentrant: bool) -> None:
    # Autograd runs the backward pass of a GPU in a thread of its own.
    model, (_, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    expected = replayed(model, another(own))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with replay_routing(model, another(own)):
        loss = forward(model)[1]
    model.zero_grad()
    with replay_routing(model, own):
        forward(model)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert equal(got, expected.gradients)


def test_gradients_without_binding_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the binding is for: without it, recomputation takes the model's own routes and gradients change silently.
    from mismatch_ext.adapters.transformers.routing import binding

    monkeypatch.setattr(binding._Bound, "bound", lambda self, function: function)
    monkeypatch.setattr(binding, "runs_unbound", lambda gradients: False)
    model, (_, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    expected = replayed(case(QWEN)[0], another(own))
    with replay_routing(model, another(own)):
        logits, loss = forward(model)
    assert torch.equal(logits, expected.logits)
    assert not equal(backward(model, loss), expected.gradients)
