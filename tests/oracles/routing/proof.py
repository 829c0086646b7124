"""What is checked of replay in a family, on a tiny random model of it.

Bit for bit: recording changes nothing; the model's own routing, replayed, gives its own logits and gradients; another routing
is what the experts get, in every call; all of it without gradient checkpointing and with both modes of it, one forward and
backward pass after the other and interleaved. And the routers' gradients under another routing are those of finite differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from mismatch_ext.adapters.transformers.routing.layout import MoeLayout, moe_layout
from mismatch_ext.adapters.transformers.routing.record import record_routing
from mismatch_ext.adapters.transformers.routing.replay import replay_routing
from torch import Tensor, nn

from mismatch_ext.errors import ReplayError
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


@dataclass(kw_only=True)
class Result:
    """What was found about a family.

    Args:
        name: Family, and variant.
        model: Class that was built.
        router: Class and method that choose experts; empty when unknown.
        verdict: "replayable", "refused", "wrong", "unproven" or "not buildable".
        note: The reason of the last four.
        held: Checks that held.
        failed: Checks that did not.
        without: Modes of gradient checkpointing in which the plain model fails, so that nothing can be checked there.
        gradient_error: Relative error of the routers' gradients against finite differences.
    """

    name: str
    model: str
    router: str = ""
    verdict: str = "replayable"
    note: str = ""
    held: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    gradient_error: float | None = None


def prove(family: Family, without: frozenset[str] = frozenset()) -> Result:
    """Build a tiny model of a family and check that replay does there what it says, or that it is refused.

    Args:
        family: The family.
        without: Modes of gradient checkpointing to leave out, because the plain model computes other bits in them on some CPUs.
    """
    result = Result(name=family.name, model=family.model.__name__)
    try:
        model = family.build()
    except Exception as error:  # noqa: BLE001 - whatever keeps a family from being built is the finding
        result.verdict, result.note = "not buildable", f"{type(error).__name__}: {error}"
        return result
    try:
        layout = moe_layout(model)
    except ReplayError as error:
        result.verdict, result.note = "refused", str(error)
        return result
    result.router = " or ".join(sorted({f"{type(r.module).__name__}.{r.method}" for r in layout.routers}))
    try:
        plain = run(model)
    except Exception as error:  # noqa: BLE001 - transformers' own failure, before anything of ours is in place
        result.verdict, result.note = "not buildable", f"its own forward fails: {type(error).__name__}: {error}"
        return result
    if not plain.same(run(model)):
        result.verdict, result.note = "not buildable", "two passes of the plain model differ; nothing can be compared"
        return result
    modes = _modes(family, plain, without)
    result.without = [mode for mode in CHECKPOINTING.values() if mode not in modes.values()]
    try:
        with record_routing(model):
            run(model)
    except ReplayError as error:
        result.verdict, result.note = "refused", str(error)
        return result
    try:
        for name, holds in itertools.chain(_exactness(model, layout, plain, modes), _slope(family, result, modes)):
            (result.held if holds else result.failed).append(name)
    except Exception as error:  # noqa: BLE001 - one new family must not take the page of all others with it
        result.verdict, result.note = "unproven", f"{type(error).__name__}: {error}"
        return result
    if result.failed:
        result.verdict, result.note = "wrong", "; ".join(result.failed)
    return result


def _modes(family: Family, plain: Pass, without: frozenset[str]) -> dict[bool | None, str]:
    """Return the modes of gradient checkpointing in which the plain model computes what it computes without."""
    modes: dict[bool | None, str] = {}
    for reentrant, mode in CHECKPOINTING.items():
        if mode in without:
            continue
        model: Any = family.build()
        try:
            if reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            works = run(model).same(plain)
        except Exception:  # noqa: BLE001 - whatever transformers raises, nothing of ours is in place
            works = False
        if works:
            modes[reentrant] = mode
    return modes


def _exactness(model: Any, layout: MoeLayout, plain: Pass, modes: dict[bool | None, str]) -> Iterator[tuple[str, bool]]:
    """Yield the name of each check that is bit for bit, and whether it held."""
    with watched(layout) as seen, record_routing(model) as recording:
        recorded = run(model)
    own = recording.trace
    other = another(own)
    yield "recording changes nothing", recorded.same(plain)
    yield "recorded experts ran", seen.ran(own, recorded.gradients)
    with replay_routing(model, other, others=vouched(model)):
        replayed = run(model)
    yield "another routing changes logits", not torch.equal(replayed.logits, plain.logits)
    yield "nothing stays behind", run(model).same(plain)
    for reentrant, mode in modes.items():
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for routing, trace, expected in (("own", own, plain), ("another", other, replayed)):
            with watched(layout) as seen, replay_routing(model, trace, others=vouched(model)):
                got = run(model)
            yield f"{routing} routing bit-identical, {mode}", got.same(expected)
            yield f"{routing} routing ran exactly, {mode}", seen.ran(trace, got.gradients)
            yield f"{routing} routing recomputed, {mode}", seen.times() == {1 if reentrant is None else 2}
        with replay_routing(model, other, others=vouched(model)):
            first = forward(model)
        with replay_routing(model, own, others=vouched(model)):
            second = forward(model)
        grown = [backward(model, loss) for loss in (second[1], first[1])]
        yield (
            f"interleaved micro-batches, {mode}",
            equal(grown[0], plain.gradients) and equal(grown[1], replayed.gradients),
        )


def _slope(family: Family, result: Result, modes: dict[bool | None, str]) -> Iterator[tuple[str, bool]]:
    """Yield the checks of the routers' gradients against finite differences, in float64 if the family computes in it."""
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
        yield f"gradients that finite differences are compared with, {mode}", equal(grown, gradients)
    result.gradient_error = gradient_error(model, trace, gradients, steps)
    yield (
        f"router gradients against finite differences: {result.gradient_error:.1e}",
        result.gradient_error <= TOLERANCE,
    )


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
