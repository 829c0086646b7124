"""Replay under activation checkpointing: every way to enable it, and backward passes in any order."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from torch import Tensor
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from verl.utils.activation_offload import ActivationHandler

from mismatch_ext.errors import ReplayError
from tests.oracles.routing.passes import (
    another,
    backward,
    equal,
    forward,
    tokens,
    watched,
)
from tests.peers.transformers.cases import FAMILIES, QWEN, REENTRANT, case, replayed
from tests.traces import same


def enable(model: Any, how: str) -> None:
    """Enable checkpointing in one of the ways that trainers do."""
    kind, _, mode = how.partition(" ")
    reentrant = mode == "reentrant"
    if kind == "model":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    elif kind == "context_fn":
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": lambda: (nullcontext(), nullcontext())}
        )
    elif kind == "wrapper":  # as FSDP's activation checkpointing does
        implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        layers = model.model.layers
        for index in range(len(layers)):
            layers[index] = checkpoint_wrapper(layers[index], checkpoint_impl=implementation)
    elif kind == "verl":  # as its activation offload does; moving activations takes a GPU
        filtered = SimpleNamespace(update_model_parameters=lambda module: None)
        handler = ActivationHandler(nullcontext(), lambda output: output, filtered, enable_ckpt=True)
        model.enable_input_require_grads()  # verl has disabled what had enabled it
        for layer in model.model.layers:
            handler.wrap_module_forward_method(layer)


class Recomputed(torch.autograd.Function):
    """A checkpoint of somebody's own: runs without gradients, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Any, rows: torch.Tensor) -> Any:
        ctx.run, ctx.rows = run, rows.detach()
        return run(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        rows = ctx.rows.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(rows), gradient)
        return None, rows.grad


WAYS = ["model reentrant", "model saved", "context_fn saved", "wrapper reentrant", "wrapper saved", "verl reentrant"]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_enable_checkpointing(way: str) -> None:
    model, (reference, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    trace = another(own)
    expected = replayed(reference, trace)
    enable(model, way)
    with watched(moe_layout(model)) as seen:
        got = replayed(model, trace)
    assert torch.equal(got.logits, expected.logits) and seen.times() == {2}
    renamed = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in got.gradients.items()}
    assert equal(renamed, expected.gradients)


@pytest.mark.parametrize(
    "way, place",
    [
        ("composable", "layer 2"),
        ("foreign", "layer 3"),
        ("enabled too late, reentrant", "layer 0"),
        ("enabled too late, saved", "layer 0"),
        ("whole, reentrant", "the model"),
        ("whole, saved", "the model"),
    ],
)
def test_checkpoints_that_cannot_be_bound_are_refused_in_the_forward(way: str, place: str) -> None:
    model, (_, own, _) = FAMILIES[QWEN].build(), case(QWEN)
    layers, reentrant, run_model = model.model.layers, way.endswith("reentrant"), forward
    if way == "composable":
        composable_checkpoint(layers[2])
    elif way == "foreign":  # as DeepSpeed's
        plain = layers[3].forward
        layers[3].forward = lambda hidden, **given: Recomputed.apply(lambda rows: plain(rows, **given), hidden)
    elif way.startswith("whole"):
        embedded = model.get_input_embeddings()(tokens()).detach().requires_grad_()
        run_model = lambda model: torch.utils.checkpoint.checkpoint(  # noqa: E731
            lambda given: model(inputs_embeds=given, use_cache=False).logits, embedded, use_reentrant=reentrant
        )
    with pytest.raises(ReplayError, match=f"{place} runs in a checkpoint that replay does not reach"):
        with replay_routing(model, own, others="replay"):
            if way.startswith("enabled"):
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            run_model(model)
    if way in ("composable", "foreign"):
        with record_routing(model) as recording:  # recomputes what it chose itself, whoever does it
            backward(model, forward(model)[1])
        assert same(recording.trace, own)


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
