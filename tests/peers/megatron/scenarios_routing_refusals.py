"""What cannot be recorded or replayed of a real megatron-core model on one rank: traces, models, settings and calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.routing import RoutingTrace
from tests.peers.megatron.cpu import (
    BATCH,
    EXPERTS,
    SEQUENCE,
    TOP_K,
    alone,
    build,
    chosen,
    run,
    tokens,
)
from tests.peers.megatron.parked import moe_layout, record_routing
from tests.peers.megatron.scenarios_routing import ROWS, expected_maps, random_trace, refused, replay_routing


@alone
def rows_and_ids() -> dict[str, Any]:
    """Give traces that do not fit."""
    model, ids = build(), tokens(1)
    good = random_trace(5)

    def trial(trace: RoutingTrace, mask: Tensor | None = None) -> str:
        def go() -> float:
            with torch.no_grad(), replay_routing(model, trace, mask):
                return float(run(model, ids).sum())

        return refused(go)

    def changed(row: int, layer: int, experts: list[int]) -> RoutingTrace:
        part = good.experts.clone()
        part[row, layer] = torch.tensor(experts, dtype=torch.uint8)
        return RoutingTrace(parts=(part,), layers=good.layers, num_experts=EXPERTS)

    def ingest(array: Tensor) -> str:
        layers = (0, 1, 2, 3)

        def go() -> int:
            return RoutingTrace.ingest(
                array, num_experts=EXPERTS, layers=layers, tokens=ROWS, version=0, request="r1", top_k=TOP_K
            ).rows

        return refused(go)

    wide = good.experts.to(torch.int64)
    whole = torch.ones(ROWS, dtype=torch.bool)
    return {
        "good": trial(good),
        "missing_row": trial(random_trace(5, rows=ROWS - 1)),
        "surplus_row": trial(random_trace(5, rows=ROWS + 1)),
        "one_sample": trial(random_trace(5, rows=SEQUENCE)),
        "zeros": trial(changed(7, 2, [0, 0])),
        "duplicate": trial(changed(7, 2, [3, 3])),
        "out_of_range": trial(changed(7, 2, [3, EXPERTS])),
        "bad_row_is_native": trial(changed(7, 2, [0, 0]), whole & (torch.arange(ROWS) != 7)),
        "mask_rows": trial(good, whole[:-1]),
        "mask_dtype": trial(good, whole.float()),
        "int16_part": refused(
            lambda: RoutingTrace(parts=(wide.to(torch.int16),), layers=good.layers, num_experts=EXPERTS)
        ),
        "sentinel": ingest(wide.masked_fill(wide == 3, -1)),
        "ingest_all_zero_layer": ingest(wide * (torch.arange(4) != 2)[:, None]),
        "ingest_wide_is_good": ingest(wide.to(torch.int16)),
        "layers": trial(random_trace(5, layers=(0, 1, 2, 4))),
        "fewer_layers": trial(random_trace(5, layers=(0, 1, 2))),
        "experts": trial(RoutingTrace(parts=good.parts, layers=good.layers, num_experts=16)),
        "top_k": trial(RoutingTrace(parts=(good.experts[..., :1],), layers=good.layers, num_experts=EXPERTS)),
    }


@alone
def refusals() -> dict[str, str]:
    """Try models, settings and calls that cannot be recorded or replayed."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    ids, trace = tokens(1), random_trace(5)

    def entering(model: Any) -> str:
        def go() -> None:
            with replay_routing(model, trace):
                pass

        assert refused(lambda: record_routing(model).__enter__()) == refused(go)
        return refused(go)

    def with_setting(**settings: Any) -> str:
        model = build()
        for name, value in settings.items():
            setattr(model.config, name, value)
        return entering(model)

    found = {
        "fusion": with_setting(moe_router_fusion=True),
        "context_parallel": with_setting(context_parallel_size=2),
        "force_balance": with_setting(moe_router_force_load_balancing=True),
        "capacity": with_setting(moe_expert_capacity_factor=1.0),
        "cuda_graph": with_setting(cuda_graph_impl="local"),
        "overlap": with_setting(overlap_moe_expert_parallel_comm=True),
        "sinkhorn": entering(build(moe_router_load_balancing_type="sinkhorn")),
        "dense": entering(build(num_moe_experts=None, moe_ffn_hidden_size=None)),
        "no_decoder": entering(torch.nn.Linear(2, 2)),
    }
    model = build()
    found["twice"] = refused(lambda: moe_layout([model, model]))
    found["same_layers"] = refused(lambda: moe_layout([model, build()]))

    model = build()
    model.decoder.layers[1].mlp.router.layer_number = 4
    found["layer_number"] = entering(model)

    model = build()
    model.extra = TopKRouter(model.config, groups_of(model))
    found["stray_router"] = entering(model)

    plain = TopKRouter.routing
    TopKRouter.routing = lambda *args, **kwargs: plain(*args, **kwargs)
    found["patched_router"] = entering(build())
    TopKRouter.routing = plain

    model = build(moe_enable_routing_replay=True)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    found["native_active"] = entering(model)
    RouterReplay.clear_global_router_replay_action()
    with torch.no_grad(), chosen(model) as maps, replay_routing(model, trace):
        run(model, ids)
        # Switched on in the middle: ours is asked, the native one's stale target is not.
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        run(model, ids)
    RouterReplay.clear_global_router_replay_action()
    right = all(torch.equal(each, expected_maps(trace)[layer]) for layer in maps for each in maps[layer])
    found["native_idle"] = f"right: {right}"

    model = build()

    def nested() -> None:
        with replay_routing(model, trace), record_routing(model):
            pass

    found["nested"] = refused(nested)
    found["no_forward"] = entering_without_forward(model, trace)

    def another_model() -> None:
        with replay_routing(model, trace):
            run(rebuilt, ids)

    rebuilt = build()
    found["another_model"] = refused(another_model)

    def no_record() -> Any:
        with record_routing(model) as recording:
            pass
        return recording.trace

    found["nothing_recorded"] = refused(no_record)

    def not_asked() -> Any:
        with replay_routing(model, trace) as replay:
            run(model, ids)
        return replay.native

    found["native_not_asked"] = refused(not_asked)

    def forward() -> float:
        with replay_routing(model, trace):
            return float(run(model, ids).sum())

    layer = model.decoder.layers[1]
    layer.forward = lambda hidden_states, context=None, **kwargs: (hidden_states, context)
    found["skipped_layer"] = refused(forward)
    del layer.forward
    once = layer.mlp.route
    layer.mlp.route = lambda *args, **kwargs: (once(*args, **kwargs), once(*args, **kwargs))[1]
    found["repeated_router"] = refused(forward)
    del layer.mlp.route
    router = layer.mlp.router
    router.routing = lambda logits, padding_mask=None: (torch.zeros(ROWS, EXPERTS), torch.zeros(ROWS, EXPERTS).bool())
    found["bypassed_topk"] = refused(forward)
    del router.routing

    def direct() -> None:
        with replay_routing(model, trace):
            layer.mlp(torch.zeros(SEQUENCE, BATCH, 32))

    found["outside_decoder"] = refused(direct)

    def checkpointed_layer() -> None:
        own = type(layer).forward
        layer.forward = lambda hidden_states, attention_mask, rotary_pos_emb, **kwargs: (
            tensor_parallel.checkpoint(
                lambda h: own(layer, hidden_states=h, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb)[0],
                False,
                hidden_states,
            ),
            None,
        )
        forward()

    found["foreign_checkpoint"] = refused(checkpointed_layer)
    del layer.forward
    dummy = torch.zeros((), requires_grad=True)

    def checkpointed_model() -> None:
        with replay_routing(model, trace):
            tensor_parallel.checkpoint(lambda unused: run(model, ids), False, dummy)

    found["foreign_checkpoint_whole"] = refused(checkpointed_model)
    return found


def groups_of(model: Any) -> Any:
    """Return process groups for a router that is built by hand."""
    router = model.decoder.layers[0].mlp.router
    return SimpleNamespace(
        tp=router.tp_group, cp=router.cp_group, tp_cp=router.tp_cp_group, tp_dp_cp=router.tp_dp_cp_group
    )


def entering_without_forward(model: Any, trace: RoutingTrace) -> str:
    """Open a context in which nothing happens."""

    def go() -> None:
        with replay_routing(model, trace):
            pass

    return refused(go)
