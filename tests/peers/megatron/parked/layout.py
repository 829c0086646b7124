"""Where a megatron-core model keeps its routers, by absolute decoder layer, and which models cannot be replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import nn

from mismatch_ext.errors import ReplayError, RoutingError
from mismatch_ext.routing import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """The decoder block of one model chunk and its MoE layers.

    Args:
        model: The model around it, which is given the token ids.
        block: The decoder.
        moe: Its MoE layers by absolute decoder index, ascending.
        group: Tensor-parallel group.
        rank: Place in it when it divides the sequence, else 0.
        ranks: Its size when it divides the sequence, else 1.
    """

    model: nn.Module
    block: TransformerBlock
    moe: dict[int, MoELayer]
    group: Any
    rank: int
    ranks: int


@dataclass(frozen=True, kw_only=True, eq=False)
class MoeLayout:
    """The routers of what this rank holds of a model.

    Args:
        layers: Absolute decoder indices of the MoE layers of the given chunks, ascending.
        model_layers: Those of the whole model over all pipeline stages; None when they cannot be told from here.
        num_experts: Experts per layer, over all expert-parallel ranks.
        top_k: Experts per token.
        chunks: Decoder blocks, in the order given.
    """

    layers: tuple[int, ...]
    model_layers: tuple[int, ...] | None
    num_experts: int
    top_k: int
    chunks: tuple[Chunk, ...]

    def expect(self, trace: RoutingTrace) -> None:
        """Check that a trace fits: recorded in a model of this shape, over all its layers or these.

        Raises:
            RoutingError: Names what differs.
        """
        layers = self.layers
        if trace.layers != layers:
            # A pipeline stage takes its own layers out of a trace of the whole model.
            whole = self.model_layers if self.model_layers is not None else trace.layers
            if not set(layers) <= set(whole):
                raise RoutingError(f"the routing trace has MoE layers {trace.layers}, these model chunks {layers}.")
            layers = whole
        trace.expect_model(layers=layers, num_experts=self.num_experts, top_k=self.top_k)


def moe_layout(model: nn.Module | Sequence[nn.Module]) -> MoeLayout:
    """Find the routers of a megatron-core GPT model.

    Layers are numbered by what the model itself says (pipeline stage and virtual stage included); dense layers have no
    router, and those of multi-token prediction are not part of the policy's forward pass and are left alone.

    Args:
        model: A model, or its chunks under virtual pipeline parallelism; wrappers such as DDP may be around them.

    Raises:
        ReplayError: The model has no experts, or its routing cannot be replayed; names the setting and the reason.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    chunks = tuple(_chunk(each) for each in models)
    if not chunks:
        raise ReplayError("no model chunk was given; pass the model, or the list of its chunks.")
    for index, chunk in enumerate(chunks):
        if any(chunk.block is other.block for other in chunks[:index]):
            raise ReplayError("one model chunk was given twice.")
    layers = [layer for chunk in chunks for layer in chunk.moe]
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice:
        raise ReplayError(
            f"decoder layers {twice} are in several chunks: were the chunks built without `vp_stage`? Megatron then numbers "
            "them alike, and routes would go to the wrong layers."
        )
    config = chunks[0].block.config
    if not config.num_moe_experts:
        raise ReplayError("the model is dense: its config has no num_moe_experts, so there is no routing to replay.")
    routers = [moe.router for chunk in chunks for moe in chunk.moe.values()]
    shapes = {(router.num_experts, router.topk) for router in routers} or {
        (config.num_moe_experts, config.moe_router_topk)
    }
    if len(shapes) > 1:
        raise ReplayError(
            f"MoE layers differ in (experts, experts per token): {sorted(shapes)}; a trace has one of each."
        )
    num_experts, top_k = shapes.pop()
    return MoeLayout(
        layers=tuple(sorted(layers)),
        model_layers=_model_layers(config, chunks),
        num_experts=num_experts,
        top_k=top_k,
        chunks=chunks,
    )


def _chunk(model: nn.Module) -> Chunk:
    """Find the decoder of one chunk and check each of its routers."""
    prediction = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, MultiTokenPredictionBlock)
    )
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, TransformerBlock) and not f"{name}.".startswith(prediction)
    ]
    if len(found) != 1:
        raise ReplayError(
            f"{type(model).__name__} has {len(found)} transformer blocks ({', '.join(name for name, _ in found) or 'none'}); "
            "routing can be replayed in models with one decoder, such as GPTModel."
        )
    block = found[0][1]
    _refuse_settings(block.config)
    moe = dict(_moe_layers(block))
    mine = {id(layer.router) for layer in moe.values()}
    for name, module in model.named_modules():
        if isinstance(module, Router) and id(module) not in mine and not name.startswith(prediction):
            raise ReplayError(
                f"{name} ({type(module).__name__}) is not the router of a decoder layer's MoELayer; its routes would not be "
                "replayed."
            )
    divided = bool(block.config.sequence_parallel)
    return Chunk(
        model=model.get_submodule(found[0][0].rpartition(".")[0]),
        block=block,
        moe=moe,
        group=block.tp_group,
        rank=get_pg_rank(block.tp_group) if divided else 0,
        ranks=get_pg_size(block.tp_group) if divided else 1,
    )


def _moe_layers(block: TransformerBlock) -> Iterator[tuple[int, MoELayer]]:
    """Yield the MoE layers of a block with their absolute index, counted in two ways that must agree."""
    offset = get_transformer_layer_offset(block.config, block.vp_stage, get_pg_rank(block.pg_collection.pp))
    for place, layer in enumerate(block.layers):
        moe = getattr(layer, "mlp", None)
        if not isinstance(moe, MoELayer):
            continue
        index = layer.layer_number - 1
        numbers = {layer.layer_number, moe.layer_number, moe.router.layer_number, offset + place + 1}
        if len(numbers) > 1 or index >= block.config.num_layers:
            raise ReplayError(
                f"the decoder layer at place {place} of this stage is number {offset + place + 1} of {block.config.num_layers} "
                f"by the pipeline layout, but layer, MoE layer and router say {layer.layer_number}, {moe.layer_number} and "
                f"{moe.router.layer_number}; was a layer_number overwritten?"
            )
        _refuse_router(moe.router, index)
        yield index, moe


def _refuse_settings(config: Any) -> None:
    """Refuse settings under which the routes that run are not those that the router's top-k returns."""
    refused = (
        (
            config.moe_router_fusion,
            "moe_router_fusion",
            "the fused kernel chooses experts where nothing can be replayed",
        ),
        (
            config.context_parallel_size > 1,
            "context_parallel_size > 1",
            "rows are divided in another order than a trace has",
        ),
        (config.moe_router_force_load_balancing, "moe_router_force_load_balancing", "gate weights are random numbers"),
        (
            config.moe_expert_capacity_factor is not None,
            "moe_expert_capacity_factor",
            "routes are dropped after selection",
        ),
        (
            config.cuda_graph_impl != "none",
            f"cuda_graph_impl={config.cuda_graph_impl!r}",
            "a captured router ignores a trace",
        ),
        (
            config.overlap_moe_expert_parallel_comm,
            "overlap_moe_expert_parallel_comm",
            "its schedule runs layers piecemeal and not through the decoder's forward",
        ),
    )
    for on, setting, reason in refused:
        if on:
            raise ReplayError(f"routing cannot be recorded or replayed with {setting}: {reason}. Turn it off.")


def _refuse_router(router: Any, layer: int) -> None:
    """Refuse a router that is not megatron-core's own top-k router, or that somebody else is replaying."""
    where = f"decoder layer {layer}"
    if not isinstance(router, TopKRouter):
        raise ReplayError(f"{where}: {type(router).__name__} is not a TopKRouter; its selection cannot be replayed.")
    if "sinkhorn" in router.routing_type:
        raise ReplayError(f"{where}: sinkhorn routing selects experts over the whole batch and has no top-k to replay.")
    if type(router).routing.__module__ != TopKRouter.__module__:
        raise ReplayError(
            f"{where}: {type(router).__name__}.routing was replaced by {type(router).routing.__module__}; two replays cannot "
            "share a router. Remove the other patch."
        )
    if getattr(router.router_replay, "router_replay_action", None) is not None:
        raise ReplayError(
            f"{where}: megatron's own RouterReplay is active ({router.router_replay.router_replay_action}); call "
            "RouterReplay.clear_global_router_replay_action(), or better set moe_enable_routing_replay=False."
        )


def _model_layers(config: Any, chunks: tuple[Chunk, ...]) -> tuple[int, ...] | None:
    """Return the MoE layers of the whole model: all are here, or the config's pattern agrees with those that are."""
    built = {layer.layer_number - 1 for chunk in chunks for layer in chunk.block.layers}
    here = {layer for chunk in chunks for layer in chunk.moe}
    if built == set(range(config.num_layers)):
        return tuple(sorted(here))
    frequency = config.moe_layer_freq
    pattern = (
        [index % frequency == 0 for index in range(config.num_layers)]
        if isinstance(frequency, int)
        else [bool(moe) for moe in frequency]
    )
    whole = {index for index, moe in enumerate(pattern) if moe}
    return tuple(sorted(whole)) if whole & built == here else None
