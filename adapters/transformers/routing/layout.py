"""Find where a transformers model chooses experts, by structure, so that a new family needs no entry in a list.

A mixture-of-experts block is a module with a child `experts`, or a gate that ranks experts by itself. The block's router is the
code in it that calls `topk`: a method `route_tokens_to_experts`, a sub-module, or the block's own forward. Every forward pass
checks what was found here: in every layer the router must ask exactly once for the top K of E scores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mismatch_ext.adapters.transformers.routing.source import calls_topk, chooses_by
from torch import nn

from mismatch_ext.errors import ReplayError
from mismatch_ext.routing import RoutingShape, RoutingTrace

# Names that families give to the number of experts, and to the number of experts per token; the first that a router has counts.
# Since transformers 5.17 LongCat's router has both of the first two, and the second does not count its zero experts.
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
_PER_TOKEN = ("top_k", "num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
_ROUTE = "route_tokens_to_experts"
# Names that an indexer gives to the number of positions that it selects.
_SELECTED = ("index_topk",)


@dataclass(frozen=True, kw_only=True, eq=False)
class Router:
    """The code of one layer that chooses experts.

    Args:
        layer: Absolute decoder index.
        name: Path of the module, for messages.
        module: The module whose method calls `topk`.
        method: Name of that method.
        experts: The module that gets the chosen experts; None if there is no such module.
    """

    layer: int
    name: str
    module: nn.Module
    method: str
    experts: nn.Module | None


@dataclass(frozen=True, kw_only=True, eq=False)
class MoeLayout:
    """The routers of a model.

    Args:
        shape: Its layers, the number of experts that a router ranks, and of experts per token.
        routers: The routers. Several of one layer are alternatives (PEFT's copies); a forward pass runs one of them.
        decoder: The module that runs the layers; one call of it is one forward pass, however the model is wrapped.
        caller: The module that embeds the tokens for the decoder, if the model mixes them with other inputs; otherwise None.
        family: `model_type` of the config, for messages.
        selectors: Modules beside the routers that select by a top-k, such as an indexer of key positions, with their paths.
    """

    shape: RoutingShape
    routers: tuple[Router, ...]
    decoder: nn.Module
    caller: nn.Module | None
    family: str
    selectors: tuple[tuple[str, nn.Module], ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """Absolute decoder indices of the MoE layers, ascending."""
        return self.shape.layers

    @property
    def num_experts(self) -> int:
        """Number of experts that a router ranks."""
        return self.shape.num_experts

    @property
    def top_k(self) -> int:
        """Number of experts per token."""
        return self.shape.top_k

    def places(self) -> tuple[tuple[int, ...], ...]:
        """Return the identities of the routers and experts; two layouts of the same objects have equal ones."""
        return tuple((id(router.module), id(router.experts), router.layer) for router in self.routers)

    @property
    def unreplayed(self) -> str | None:
        """Describes what the model selects besides experts, which traces do not hold and replay does not touch, or None."""
        if not self.selectors:
            return None
        name, module = self.selectors[0]
        size = _integer(module, _SELECTED)
        of = "" if size is None else f", {size} at most"
        return (
            f"{self.family}: {len(self.selectors)} modules beside the routers select by a top-k, the first is {name} "
            f"({type(module).__name__}{of}). Routes are of experts alone: what these select, such as the keys that a token "
            "attends to, is each side's own choice, a part of the gap where there is more to choose from, and is not replayed."
        )

    def expect(self, trace: RoutingTrace) -> None:
        """Check that a trace was recorded in a model of this shape.

        Raises:
            RoutingError: Names what differs.
        """
        trace.expect_model(layers=self.layers, num_experts=self.num_experts, top_k=self.top_k)


def moe_layout(model: nn.Module) -> MoeLayout:
    """Find the routers of a transformers model.

    Args:
        model: A model, or a wrapper around it (PEFT, DDP, FSDP, torch.compile).

    Raises:
        ReplayError: The model has no experts, or its routing cannot be replayed; names family, module and reason.
    """
    family = _family(model)
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ReplayError(
            f"{family}: nn.DataParallel runs copies of the model, which replay would not reach; use "
            "DistributedDataParallel or FSDP."
        )
    names = dict(model.named_modules())
    routers: list[Router] = []
    shapes: set[tuple[int, int]] = set()
    stacks: set[str] = set()
    blocks: list[str] = []
    for name, block in _blocks(names):
        blocks.append(f"{name}.")
        stack, layer = _place(names, name, family)
        stacks.add(stack)
        for module, method in _routing_code(block, name, family):
            shapes.add(_shape(model, block, module, f"{family}: {name}"))
            experts = _experts(block, module)
            routers.append(Router(layer=layer, name=name, module=module, method=method, experts=experts))
    if not routers:
        raise ReplayError(f"{family}: {_why_none(names)}")
    if len(stacks) > 1:
        raise ReplayError(
            f"{family}: there are experts in several stacks of layers ({', '.join(sorted(stacks))}), and a trace numbers the "
            "layers of one; pass the part that is trained."
        )
    if len(shapes) > 1:
        raise ReplayError(
            f"{family}: MoE layers differ in (experts, experts per token): {sorted(shapes)}; a trace has one of each."
        )
    _refuse_two_in_a_layer(routers, family)
    num_experts, top_k = shapes.pop()
    stack = stacks.pop()
    decoder = stack.rpartition(".")[0]
    shape = RoutingShape(
        num_layers=len(cast(nn.ModuleList, names[stack])),
        layers=tuple(sorted({router.layer for router in routers})),
        num_experts=num_experts,
        top_k=top_k,
    )
    selectors = [
        (name, module)
        for name, module in names.items()
        if calls_topk(type(module)) and not f"{name}.".startswith(tuple(blocks))
    ]
    return MoeLayout(
        shape=shape,
        routers=tuple(sorted(routers, key=lambda router: router.layer)),
        decoder=names[decoder],
        caller=_caller(names, decoder),
        family=family,
        selectors=tuple(selectors),
    )


def _caller(names: dict[str, nn.Module], decoder: str) -> nn.Module | None:
    """Return the innermost model around the decoder that also has other parts, such as a multimodal model; None if none has."""
    while decoder:
        decoder = decoder.rpartition(".")[0]
        # Not simply the decoder's parent, because Llama 4 has a whole language model between the two.
        if getattr(getattr(names[decoder], "config", None), "text_config", None) is not None:
            return names[decoder]
    return None


def _blocks(names: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that mix experts."""
    blocks: list[str] = []
    for name, module in names.items():
        # Only a real child counts, because PEFT's wrappers also show the attributes of what they wrap.
        has_experts = module._modules.get("experts") is not None
        if has_experts or (_is_gate(module) and not name.startswith(tuple(blocks))):
            blocks.append(f"{name}.")
            yield name, module


def _experts(block: nn.Module, router: nn.Module) -> nn.Module | None:
    """Return the module that gets the chosen experts; None if the router is a part of it, or if it is a mere list of experts."""
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module) or type(experts).forward is nn.Module.forward:
        return None
    return None if any(router is part for part in experts.modules()) else experts


def _is_gate(module: nn.Module) -> bool:
    """Tell whether a module without a sibling `experts` ranks experts: a top-k over a gate with one output per expert."""
    if not calls_topk(type(module)):
        return False
    experts = _integer(module, _EXPERTS)
    return (
        experts is not None
        and _integer(module, _PER_TOKEN) is not None
        and any(isinstance(part, nn.Linear) and part.out_features == experts for part in module.modules())
    )


def _routing_code(block: nn.Module, name: str, family: str) -> list[tuple[nn.Module, str]]:
    """Return the module and method in which a block chooses experts; several where PEFT keeps copies.

    Raises:
        ReplayError: No code of the block calls `topk`, or replayed experts could have gate weights of zero.
    """
    # Transformers up to 5.10 keeps the method at the block, and later ones at its router.
    methods = {getattr(module, "topk_method", "greedy") for module in block.modules()}
    masking = sorted(methods - {"greedy", "noaux_tc"})
    if masking:
        # This top-k is over scores that are 0 outside the chosen groups, and its values are the gate weights.
        raise ReplayError(
            f"{family}: {name} has topk_method={masking[0]!r}, whose gate weights are zero, without gradient, for "
            "experts outside the groups that the trainer chooses. Replayable: 'greedy'."
        )
    routes = [(module, _ROUTE) for module in block.modules() if callable(getattr(type(module), _ROUTE, None))]
    if routes:
        return routes
    parts = [(module, "forward") for module in block.modules() if module is not block and calls_topk(type(module))]
    if parts:
        return parts
    if calls_topk(type(block)):
        return [(block, "forward")]
    gates = [type(part) for child, part in block.named_children() if child in ("gate", "router", "gating")]
    chooser = (
        f"{gates[0].__name__} selects in another way ({chooses_by(gates[0])})"
        if gates
        else "the block is told which to run"
    )
    raise ReplayError(
        f"{family}: {name} ({type(block).__name__}) has experts, but no top-k chooses them: {chooser}. There is nothing to "
        "replay through."
    )


def _place(names: dict[str, nn.Module], name: str, family: str) -> tuple[str, int]:
    """Return the path of the stack of layers that contains a module, and the index of the module's layer in the stack."""
    path = name.split(".")
    for depth in range(1, len(path)):
        stack = ".".join(path[:depth])
        if isinstance(names[stack], nn.ModuleList) and path[depth].isdigit():
            return stack, int(path[depth])
    raise ReplayError(f"{family}: {name} has experts outside a list of layers; its layer's index cannot be told.")


def _shape(model: nn.Module, block: nn.Module, router: nn.Module, where: str) -> tuple[int, int]:
    """Return the numbers of experts and of experts per token: from the router, otherwise its block, otherwise the config."""
    holders: list[Any] = [router, block, getattr(block, "experts", None)]
    holders += [getattr(holder, "config", None) for holder in (*holders, model)]
    holders += [getattr(holder, "text_config", None) or getattr(holder, "ffn_config", None) for holder in holders[3:]]
    return _sizes(holders, where)


def sizes_of_config(config: Any) -> tuple[int, int]:
    """Return the numbers of experts and of experts per token that the config of a language model states; raises ReplayError."""
    return _sizes([config, getattr(config, "ffn_config", None)], f"{config.model_type}: its config")


def _sizes(holders: Sequence[Any], where: str) -> tuple[int, int]:
    sizes = []
    for what, attributes in (("number of experts", _EXPERTS), ("experts per token", _PER_TOKEN)):
        size = next(
            (value for value in (_integer(holder, attributes) for holder in holders) if value is not None), None
        )
        if size is None:
            raise ReplayError(f"{where}: the {what} is under none of the attributes {', '.join(attributes)}.")
        sizes.append(size)
    return sizes[0], sizes[1]


def _integer(holder: Any, attributes: tuple[str, ...]) -> int | None:
    values = (getattr(holder, attribute, None) for attribute in attributes)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def _refuse_two_in_a_layer(routers: list[Router], family: str) -> None:
    """Refuse layers with two routers, which a trace cannot tell apart; PEFT's copies of one router count as one."""
    first: dict[int, str] = {}
    for router in routers:
        site = re.sub(r"\.(original_module|modules_to_save\.[^.]+)", "", router.name)
        if first.setdefault(router.layer, site) != site:
            raise ReplayError(
                f"{family}: layer {router.layer} has several routers ({first[router.layer]} and {site}); a trace has one "
                "choice of experts per layer."
            )


def _why_none(names: dict[str, nn.Module]) -> str:
    """Say why no router was found, and name the module that comes nearest to one."""
    for name, module in names.items():
        if _integer(module, _EXPERTS) is not None and calls_topk(type(module)):
            return (
                f"{name} ({type(module).__name__}) chooses experts by a top-k, but not over one score per expert (product "
                "keys, for example): positions in it are no expert ids, and cannot be replayed."
            )
    return "no module of the model has experts, so there is no routing to record or replay."


def _family(model: nn.Module) -> str:
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(kind, str) and kind:
            return kind
    return type(model).__name__
