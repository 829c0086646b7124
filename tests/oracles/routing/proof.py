"""What is checked of replay in a family, on a tiny random model of it.

Bit for bit: recording changes nothing; the model's own routing, replayed, gives its own logits and gradients; another routing
is what the experts get, in every call; all of it without gradient checkpointing and with both modes of it, one forward and
backward pass after the other and interleaved. And the routers' gradients under another routing are those of finite differences.
"""

from __future__ import annotations

from typing import Any

import torch
from mismatch_ext.adapters.transformers.routing.layout import MoeLayout, moe_layout
from mismatch_ext.adapters.transformers.routing.record import record_routing
from mismatch_ext.adapters.transformers.routing.replay import replay_routing
from torch import Tensor, nn

from mismatch_ext.routing import RoutingTrace
from tests.oracles.routing.passes import (
    Pass,
    another,
    backward,
    equal,
    forward,
    run,
    vouched,
    watched,
)
from tests.oracles.routing.tiny import Family

# Gradient checkpointing off, and `use_reentrant` where it is on.
CHECKPOINTING = {None: "no checkpoints", True: "reentrant", False: "non-reentrant"}
# Of a unit direction, for finite differences; a right gradient is near one of them, a wrong one near none. Routers and linear
# attention compute in float32 even in a float64 model, and losses are noisy over a short step or curved over a long one.
STEPS = (2e-3, 1.6e-2)
# For models that compute in float32 alone, whose losses are noisier.
STEPS_IN_FLOAT32 = (1e-2, 6e-2)
TOLERANCE = 1e-3


def prove(family: Family, without: frozenset[str] = frozenset()) -> None:
    """Build a tiny model of a family, and assert that replay does there what it says.

    Args:
        family: The family.
        without: Modes of gradient checkpointing to leave out, because the plain model computes other bits in them on some CPUs.
    """
    modes = {reentrant: mode for reentrant, mode in CHECKPOINTING.items() if mode not in without}
    model: Any = family.build()
    layout, plain = moe_layout(model), run(model)
    assert plain.same(run(model)), "two passes of the plain model differ, so that nothing can be compared"
    with watched(layout) as seen, record_routing(model) as recording:
        recorded = run(model)
    assert recorded.same(plain), "recording changes something"
    own = recording.trace
    assert seen.ran(own, recorded.gradients), "other experts ran than were recorded"
    other = another(own)
    with replay_routing(model, other, others=vouched(model)):
        replayed = run(model)
    assert not torch.equal(replayed.logits, plain.logits), "another routing changes nothing"
    assert run(model).same(plain), "something stays behind"
    for reentrant, mode in modes.items():
        _prove_exactness(family, reentrant, mode, (own, plain), (other, replayed))
    _prove_slope(family, modes)


def _prove_exactness(
    family: Family, reentrant: bool | None, mode: str, own: tuple[RoutingTrace, Pass], other: tuple[RoutingTrace, Pass]
) -> None:
    """Assert that routes give their pass bit for bit, one after the other and interleaved."""
    model: Any = family.build()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert run(model).same(own[1]), f"{mode}: the plain model computes something else"
    layout, losses = moe_layout(model), []
    for trace, expected in (own, other):
        with watched(layout) as seen, replay_routing(model, trace, others=vouched(model)):
            got = run(model)
        assert got.same(expected), f"{mode}: replay is not bit-identical"
        assert seen.ran(trace, got.gradients), f"{mode}: other experts ran than are replayed"
        assert seen.times() == {1 if reentrant is None else 2}, f"{mode}: the experts were not recomputed"
    for trace, _ in (other, own):
        with replay_routing(model, trace, others=vouched(model)):
            losses.append(forward(model)[1])
    for loss, (_, expected) in zip(reversed(losses), (own, other), strict=True):
        assert equal(backward(model, loss), expected.gradients), f"{mode}: interleaved micro-batches mix their routes"


def _prove_slope(family: Family, modes: dict[bool | None, str]) -> None:
    """Hold the routers' gradients against finite differences, in float64 if the family computes in it."""
    model: Any = family.build(torch.float64)
    steps = STEPS
    try:
        with torch.no_grad():
            forward(model)
    except RuntimeError:  # its router's input is float32, whatever its weight is
        model, steps = family.build(), STEPS_IN_FLOAT32
    with torch.no_grad(), record_routing(model) as recording:
        forward(model)
    trace = another(recording.trace)
    gradients: dict[str, Tensor] = {}
    for reentrant, mode in modes.items():
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with replay_routing(model, trace, others=vouched(model)):
            loss = forward(model)[1]
        grown = backward(model, loss)
        gradients = gradients or grown
        assert equal(grown, gradients), f"{mode}: gradients differ"
    error = gradient_error(model, trace, gradients, steps)
    assert error <= TOLERANCE, f"the routers' gradients are {error:.1e} from finite differences"


def gradient_error(
    model: nn.Module, trace: RoutingTrace, gradients: dict[str, Tensor], steps: tuple[float, ...] = STEPS
) -> float:
    """Compare the routers' gradients under replay with finite differences of the loss.

    Args:
        model: A model; its routers' parameters are moved.
        trace: The routing that is replayed.
        gradients: Of all parameters, under that routing.
        steps: Lengths of the finite differences.

    Returns:
        Relative error of the directional derivative along the gradient plus a random direction, over all routers; infinite
        when a router has no gradient.
    """
    routers = router_parameters(model, moe_layout(model))
    parameters = [(name, parameter) for name, parameter in routers.items() if name in gradients]
    if not parameters or any(not gradients[name].any() for name, _ in parameters):
        return float("inf")
    generator = torch.Generator().manual_seed(3)
    noise = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for _, p in parameters]
    slope = [gradients[name] for name, _ in parameters]
    direction = [_unit(slope, g) + _unit(noise, r) for g, r in zip(slope, noise, strict=True)]
    exact = sum(float((g * d).sum()) for g, d in zip(slope, direction, strict=True))

    @torch.no_grad()
    def difference(step: float) -> float:
        ends = []
        for sign in (1, -2, 1):  # forth, back past the start, and to the start
            for (_, parameter), d in zip(parameters, direction, strict=True):
                parameter.add_(sign * step * d)
            with replay_routing(model, trace, others=vouched(model)):
                ends.append(float(forward(model)[1]))
        return (ends[0] - ends[1]) / (2 * step)

    # A step and its double cancel the leading error of each.
    estimates = [(4 * difference(step) - difference(2 * step)) / 3 for step in steps]
    return min(abs(estimate - exact) for estimate in estimates) / abs(exact)


def _unit(whole: list[Tensor], part: Tensor) -> Tensor:
    scaled: Tensor = part / torch.stack([x.norm() for x in whole]).norm()
    return scaled


def router_parameters(model: nn.Module, layout: MoeLayout) -> dict[str, nn.Parameter]:
    """Return the parameters with one row per expert in MoE blocks, their experts' own excepted.

    A router that weighs shared experts too has a row for each of these.
    """
    found = {}
    for router in layout.routers:
        block = model.get_submodule(router.name)
        experts = getattr(block, "experts", None)
        own = {id(p) for p in experts.parameters()} if isinstance(experts, nn.Module) else set()
        rows = {layout.num_experts, layout.num_experts + getattr(router.module, "n_shared_experts", 0)}
        for name, parameter in block.named_parameters():
            if parameter.requires_grad and parameter.shape[0] in rows and id(parameter) not in own:
                found[f"{router.name}.{name}"] = parameter
    return found
