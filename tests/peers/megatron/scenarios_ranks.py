"""Runs of a real megatron-core model on two ranks, which give up after a minute without each other."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_ext.routing import RoutingTrace
from tests.peers.forks import on_ranks
from tests.peers.megatron.cpu import (
    BATCH,
    RECOMPUTE,
    SEQUENCE,
    NamedCuda,
    arrange,
    build,
    chosen,
    gradients,
    loss_of,
    run,
    same,
    start,
    tokens,
)
from tests.peers.megatron.parked import moe_layout, record_routing
from tests.peers.megatron.scenarios_routing import ROWS, expected_maps, random_trace, refused, replay_routing, replayed
from tests.trace_files import load_traces

WORLD = 2


def gathered(value: Any) -> list[Any]:
    """Return every rank's value."""
    values: list[Any] = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


def parallel_on(rank: int, kinds: list[str], trace: str) -> dict[str, Any]:
    """Do what `parallel` does on one rank."""
    return {
        f"tensor={tensor} expert={expert}": parallel_of(rank, tensor, expert, kinds, trace)
        for tensor, expert in ((2, 1), (1, 2), (2, 2))
    }


def parallel_of(rank: int, tensor: int, expert: int, kinds: list[str], trace: str) -> list[Any]:
    """Replay own routes and those of another run, in one arrangement."""
    arrange(tensor=tensor, expert=expert)
    # Ranks that share tensors share the micro-batch; else each has its own.
    mine = 0 if tensor > 1 else rank
    ids, later = tokens(1 + mine), tokens(7 + mine)
    other = load_traces(trace)[0] if mine == 0 else random_trace(5)
    another = random_trace(9 + mine)
    part = slice(rank * ROWS // WORLD, (rank + 1) * ROWS // WORLD) if tensor > 1 else slice(None)
    found: dict[str, Any] = {}
    reference = None
    for kind in kinds:
        model = build(
            tensor_model_parallel_size=tensor,
            sequence_parallel=tensor > 1,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1,
            **RECOMPUTE[kind],
        )

        def forward(ids: Tensor, model: Any = model) -> Tensor:
            return run(model, ids)

        plain = forward(ids)
        loss_of(plain).backward()
        plain_gradients = gradients(model)
        with chosen(model) as maps, record_routing(model) as recording:
            recorded = forward(ids)
        own_maps = expected_maps(recording.trace)
        own, own_gradients = replayed(model, forward, ids, recording.trace)
        with chosen(model) as moved_maps:
            _, moved_gradients = replayed(model, forward, ids, another)
        # Routes of one rank's tokens: what is looked at is which rows go where.
        with chosen(model) as given_maps, torch.no_grad(), replay_routing(model, other, others="replay"):
            forward(ids)
        reference = reference or moved_gradients
        # Two micro-batches, the later one's backward pass first.
        with replay_routing(model, another):
            first = forward(ids)
        with replay_routing(model, other, others="replay"):
            second = forward(later)
        loss_of(second).backward()
        gradients(model)
        loss_of(first).backward()
        short = refused(lambda forward=forward, model=model: replayed(model, forward, ids, random_trace(5, ROWS - 1)))
        found[kind] = {
            "record_is_no_op": torch.equal(plain, recorded),
            "trace_is_what_ran": all(torch.equal(maps[layer][0], own_maps[layer][part]) for layer in maps),
            "own_is_bitwise": torch.equal(plain, own) and same(plain_gradients, own_gradients),
            "other_is_selected": all(
                torch.equal(each, expected_maps(another)[layer][part])
                for layer in moved_maps
                for each in moved_maps[layer]
            ),
            "one_ranks_trace_is_selected": all(
                torch.equal(given_maps[layer][0], expected_maps(other)[layer][part]) for layer in given_maps
            ),
            "other_matters": not same(moved_gradients, plain_gradients),
            "other_gradients_as_without_recompute": same(moved_gradients, reference),
            "later_first": same(gradients(model), moved_gradients),
            "rows": next(iter(maps.values()))[0].shape[0],
            "trace_rows": recording.trace.rows,
            "digest": int(recording.trace.experts.long().mul(torch.arange(ROWS * 8).view(ROWS, 4, 2)).sum()),
            "short": short,
        }
    found["wide"] = wide(tensor, expert, ids, part)
    return gathered(found)


def wide(tensor: int, expert: int, ids: Tensor, part: slice) -> bool:
    """Record more experts than a byte numbers, and replay them; 16-bit ids have to cross ranks, too."""
    model = build(
        num_layers=1,
        num_moe_experts=300,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
    )
    with torch.no_grad(), chosen(model) as maps:
        with record_routing(model) as recording:
            run(model, ids)
        with replay_routing(model, recording.trace):
            run(model, ids)
    wanted = expected_maps(recording.trace)[0][part]
    large = int(recording.trace.layer(0).max()) > 255
    return (
        large and recording.trace.experts.dtype == torch.uint16 and all(torch.equal(each, wanted) for each in maps[0])
    )


def stage(rank: int, chunk: int, chunks: int, **overrides: Any) -> Any:
    """Build this rank's chunk of a model over two pipeline stages."""
    return build(
        vp_stage=chunk if chunks > 1 else None,
        first=rank == 0 and chunk == 0,
        last=rank == WORLD - 1 and chunk == chunks - 1,
        pipeline_model_parallel_size=WORLD,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        **overrides,
    )


def pass_through(rank: int, models: list[Any], ids: Tensor) -> list[tuple[Tensor | None, Tensor]]:
    """Run one micro-batch through all stages, with plain sends between them; return inputs and outputs per chunk."""
    passed = []
    for index, model in enumerate(models):
        received = None
        if not (rank == 0 and index == 0):
            received = torch.empty(SEQUENCE, BATCH, 32)
            dist.recv(received, src=(rank - 1) % WORLD)
            model.set_input_tensor(received.requires_grad_())
        output = run(model, ids)
        if not (rank == WORLD - 1 and index == len(models) - 1):
            dist.send(output.detach(), dst=(rank + 1) % WORLD)
        passed.append((received, output))
    return passed


def pass_back(rank: int, passed: list[tuple[Tensor | None, Tensor]], divisor: float = 1.0) -> None:
    """Run the backward pass of one micro-batch through all stages."""
    for index in reversed(range(len(passed))):
        received, output = passed[index]
        if rank == WORLD - 1 and index == len(passed) - 1:
            (loss_of(output) / divisor).backward()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, src=(rank + 1) % WORLD)
            output.backward(gradient)
        if received is not None:
            assert received.grad is not None
            dist.send(received.grad, dst=(rank - 1) % WORLD)


def pipeline_on(rank: int, kinds: list[str]) -> dict[str, Any]:
    """Do what `pipeline` does on one rank."""
    found = {f"chunks={chunks}": pipeline_of(rank, chunks, kinds) for chunks in (1, 2)}
    return {**found, "schedule": scheduled(rank, "uniform"), "offsets": offsets(rank)}


def pipeline_of(rank: int, chunks: int, kinds: list[str]) -> list[Any]:
    """Replay over two pipeline stages with so many chunks a rank."""
    arrange(pipeline=WORLD, virtual=chunks if chunks > 1 else None)
    found: dict[str, Any] = {}
    a, b = tokens(1), tokens(2)
    other, later = random_trace(5), random_trace(6)
    reference = None
    for kind in kinds:
        models = [stage(rank, chunk, chunks, **RECOMPUTE[kind]) for chunk in range(chunks)]
        whole = torch.nn.ModuleList(models)
        pass_back(rank, pass_through(rank, models, a))
        plain_gradients = gradients(whole)
        with torch.no_grad(), record_routing(models) as recording:
            pass_through(rank, models, a)
        with replay_routing(models, recording.trace):
            passed = pass_through(rank, models, a)
        pass_back(rank, passed)
        own_gradients = gradients(whole)
        with chosen(whole) as maps:
            with replay_routing(models, other):
                passed = pass_through(rank, models, a)
            pass_back(rank, passed)
        moved_gradients = gradients(whole)
        reference = reference or moved_gradients
        # As one forward and one backward in flight: the trace of neither is that of the other.
        with replay_routing(models, other):
            first = pass_through(rank, models, a)
        with replay_routing(models, later):
            second = pass_through(rank, models, b)
        pass_back(rank, second)
        gradients(whole)
        pass_back(rank, first)
        wanted = expected_maps(other)
        found[kind] = {
            "layers": list(moe_layout(models).layers),
            "model_layers": list(moe_layout(models).model_layers or ()),
            "recorded_layers": list(recording.trace.layers),
            "own_is_bitwise": same(plain_gradients, own_gradients),
            "other_is_selected": sorted(maps) == list(moe_layout(models).layers)
            and all(torch.equal(each, wanted[layer]) for layer in maps for each in maps[layer]),
            "other_matters": not same(moved_gradients, plain_gradients),
            "other_gradients_as_without_recompute": same(moved_gradients, reference),
            "later_first": same(gradients(whole), moved_gradients),
        }
    return gathered(found)


def scheduled(rank: int, kind: str) -> list[Any]:
    """Let megatron's own 1F1B schedule run four micro-batches, each forward under its trace.

    Its interleaved schedule is not run: between two ranks over gloo it mixes up its messages, with or without replay.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    arrange(pipeline=WORLD)
    model = stage(rank, 0, 1, **RECOMPUTE[kind])
    batches = [(tokens(20 + n), random_trace(30 + n)) for n in range(4)]

    def step(iterator: Any, model: Any) -> Any:
        ids, trace = next(iterator)
        with replay_routing(model, trace):
            output = run(model, ids)
        return output, lambda output: (loss_of(output), {})

    with chosen(model) as maps, NamedCuda():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=4,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
    by_schedule = gradients(model)
    for ids, trace in batches:
        with replay_routing(model, trace):
            passed = pass_through(rank, [model], ids)
        # The schedule divides the loss by the number of micro-batches.
        pass_back(rank, passed, 4.0)
    one_by_one = gradients(model)
    wanted = [expected_maps(trace) for _, trace in batches]
    runs = {
        layer: [[torch.equal(call, want[layer]) for want in wanted].index(True) for call in maps[layer]]
        for layer in maps
    }
    return gathered(
        {
            "runs": runs,
            "error": max(float((by_schedule[n] - one_by_one[n]).abs().max()) for n in one_by_one),
            "scale": max(float(g.abs().max()) for g in one_by_one.values()),
        }
    )


def offsets(rank: int) -> list[Any]:
    """Number layers of uneven stages, of stages with dense layers, and refuse traces of another depth."""
    arrange(pipeline=WORLD)
    uneven = stage(rank, 0, 1, num_layers_in_first_pipeline_stage=1)
    dense = stage(rank, 0, 1, moe_layer_freq=[0, 0, 1, 1])
    pair = random_trace(5, layers=(2, 3))
    with torch.no_grad(), chosen(dense) as maps, replay_routing(dense, pair) as replay:
        pass_through(rank, [dense], tokens(1))
    even = stage(rank, 0, 1)

    def entering(trace: RoutingTrace) -> str:
        def go() -> None:
            with replay_routing(even, trace):
                raise RoutingAccepted

        try:
            return refused(go)
        except RoutingAccepted:
            return "accepted"

    found = {
        "uneven": list(moe_layout(uneven).layers),
        "dense": list(moe_layout(dense).layers),
        "dense_model": list(moe_layout(dense).model_layers or ()),
        "dense_replayed": replay.forwards == 1
        and all(torch.equal(maps[layer][0], expected_maps(pair)[layer]) for layer in maps),
        "whole": entering(random_trace(5)),
        "own": entering(random_trace(5, layers=(0, 1) if rank == 0 else (2, 3))),
        "others": entering(random_trace(5, layers=(2, 3) if rank == 0 else (0, 1))),
        "deeper": entering(random_trace(5, layers=(0, 1, 2, 3, 4))),
    }
    return gathered(found)


class RoutingAccepted(Exception):
    """A context was entered."""


def worker(name: str, given: dict[str, Any]) -> Any:
    """Run a scenario's part on one rank."""
    rank = int(os.environ["RANK"])
    start(rank, WORLD)
    found = globals()[name](rank, **given)
    dist.destroy_process_group()
    return found


def parallel(**given: Any) -> dict[str, Any]:
    """Replay own routes and those of another run, with ranks that share tensors, experts or both."""
    return on_ranks(worker, WORLD, name="parallel_on", given=given)[0]


def pipeline(**given: Any) -> dict[str, Any]:
    """Replay over two pipeline stages, each rank with one chunk or two; let megatron schedule; number odd stages' layers."""
    return on_ranks(worker, WORLD, name="pipeline_on", given=given)[0]
