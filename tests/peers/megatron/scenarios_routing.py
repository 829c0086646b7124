"""Runs of a real megatron-core model on one rank."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from mismatch_ext.errors import MismatchError
from mismatch_ext.routing import RoutingTrace, align
from tests.peers.megatron.cpu import (
    BATCH,
    EXPERTS,
    FORMULA,
    RECOMPUTE,
    SEQUENCE,
    TOP_K,
    alone,
    build,
    chosen,
    gradients,
    loss_of,
    run,
    same,
    tokens,
)
from tests.peers.megatron.parked import moe_layout, record_routing
from tests.peers.megatron.parked import replay_routing as proving_replay
from tests.trace_files import save_traces

ROWS = BATCH * SEQUENCE


def replay_routing(model: Any, trace: RoutingTrace, mask: Tensor | None = None, **options: Any) -> Any:
    """Replay, vouching for the tokens of random routes, which are of none."""
    return proving_replay(model, trace, mask, **{"others": "replay" if trace.tokens is None else "refuse", **options})


def random_trace(seed: int, rows: int = ROWS, layers: tuple[int, ...] = (0, 1, 2, 3)) -> RoutingTrace:
    """Return routes that no router would choose: distinct experts at random."""
    scores = torch.rand(rows, len(layers), EXPERTS, generator=torch.Generator().manual_seed(seed))
    return RoutingTrace(parts=(scores.topk(TOP_K).indices.to(torch.uint8),), layers=layers, num_experts=EXPERTS)


def expected_maps(trace: RoutingTrace, batch: int = BATCH) -> dict[int, Tensor]:
    """Spell out, token by token, the maps `[S * B, E]` that sequence-first routers must produce from a batch-first trace."""
    sequence = trace.rows // batch
    maps = {}
    for place, layer in enumerate(trace.layers):
        maps[layer] = torch.zeros(trace.rows, trace.num_experts, dtype=torch.bool)
        for s in range(sequence):
            for b in range(batch):
                for expert in trace.experts[b * sequence + s, place].tolist():
                    maps[layer][s * batch + b, expert] = True
    return maps


def recomputing(kind: str, **overrides: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Build a model that recomputes in some way, and the function that runs it."""
    kind, _, inner = kind.partition("+")
    model = build(**RECOMPUTE.get(inner or kind, {}), **overrides)
    if kind in ("torch-reentrant", "torch-saved"):
        mode = CheckpointImpl.REENTRANT if kind == "torch-reentrant" else CheckpointImpl.NO_REENTRANT
        layers = model.decoder.layers
        for index, layer in enumerate(layers):
            layers[index] = checkpoint_wrapper(layer, checkpoint_impl=mode)
    if not kind.startswith("torch-whole"):
        return model, lambda ids: run(model, ids)
    reentrant = kind == "torch-whole-reentrant"
    # A reentrant checkpoint has gradients only if an input has.
    dummy = torch.zeros((), requires_grad=True)
    return model, lambda ids: torch_checkpoint.checkpoint(
        lambda unused, ids: run(model, ids), dummy, ids, use_reentrant=reentrant
    )


def refused(action: Callable[[], Any]) -> str:
    """Return the class and message of the error that an action ends in, or what it returned."""
    try:
        return f"no error: {action()}"
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"


def replayed(model: Any, forward: Callable[[Tensor], Tensor], ids: Tensor, trace: RoutingTrace) -> tuple[Tensor, Any]:
    """Return output and gradients under a trace."""
    with replay_routing(model, trace):
        output = forward(ids)
    loss_of(output).backward()
    return output.detach(), gradients(model)


@alone
def numerics(dispatchers: list[str], formulas: list[str], kinds: list[str]) -> dict[str, Any]:
    """Record, replay a model's own routes and replay others, for all combinations."""
    return {
        f"{dispatcher} {formula} {kind}": result
        for dispatcher in dispatchers
        for formula in formulas
        for kind, result in numerics_of(dispatcher, formula, kinds).items()
    }


def numerics_of(dispatcher: str, formula: str, kinds: list[str]) -> dict[str, Any]:
    """Record, replay a model's own routes and replay others, under each way to recompute."""
    found: dict[str, Any] = {}
    ids, other = tokens(1), random_trace(5)
    reference = None
    for kind in kinds:
        model, forward = recomputing(kind, moe_token_dispatcher_type=dispatcher, **FORMULA[formula])
        plain = forward(ids)
        loss_of(plain).backward()
        plain_gradients = gradients(model)
        with record_routing(model) as recording:
            recorded = forward(ids)
        trace = recording.trace
        loss_of(recorded).backward()
        record_gradients = gradients(model)
        with chosen(model) as maps:
            with torch.no_grad():
                run(model, ids)
        is_own = all(torch.equal(maps[layer][0], wanted) for layer, wanted in expected_maps(trace).items())
        own, own_gradients = replayed(model, forward, ids, trace)
        with chosen(model) as maps:
            moved, moved_gradients = replayed(model, forward, ids, other)
        reference = reference or moved_gradients
        wanted = expected_maps(other)
        found[kind] = {
            "record_is_no_op": torch.equal(plain, recorded) and same(plain_gradients, record_gradients),
            "trace_is_what_ran": is_own and trace.rows == ROWS and trace.layers == (0, 1, 2, 3),
            "own_is_bitwise": torch.equal(plain, own) and same(plain_gradients, own_gradients),
            "other_is_selected": all(torch.equal(each, wanted[layer]) for layer in maps for each in maps[layer]),
            "runs_of_a_router": sorted({len(calls) for calls in maps.values()}),
            "other_matters": float((moved - plain).abs().max()),
            "other_gradients_as_without_recompute": same(moved_gradients, reference),
            "finite": all(bool(torch.isfinite(g).all()) for g in moved_gradients.values()),
        }
    return found


@alone
def differences() -> dict[str, dict[str, float]]:
    """Compare router gradients with differences, for every gate formula."""
    return {formula: differences_of(formula) for formula in FORMULA}


def differences_of(formula: str) -> dict[str, float]:
    """Compare router gradients under replay with central differences of the loss, per direction."""
    model, ids, other = build(**FORMULA[formula]), tokens(1), random_trace(5)
    _, found = replayed(model, lambda ids: run(model, ids), ids, other)
    routers = {name: p for name, p in model.named_parameters() if name.endswith("router.weight")}
    assert len(routers) == 4
    generator = torch.Generator().manual_seed(2)

    def loss(name: str, step: Tensor) -> float:
        with torch.no_grad():
            routers[name].add_(step)
            with replay_routing(model, other):
                value = float(loss_of(run(model, ids)))
            routers[name].sub_(step)
        return value

    errors = {}
    for name in routers:
        # Along the gradient the derivative is largest, and float32's noise least; the other half is any direction.
        along = found[name] / found[name].norm()
        aside = torch.randn(along.shape, generator=generator)
        direction = along + aside / aside.norm()
        step = 2e-2 * direction
        measured = (loss(name, step) - loss(name, -step)) / 4e-2
        predicted = float((found[name] * direction).sum())
        errors[name] = abs(measured - predicted) / abs(predicted)
    return errors


@alone
def interleaved(kinds: list[str]) -> dict[str, Any]:
    """Run two micro-batches before either's backward pass, in any order, and after forward-only replays."""
    return {kind: interleaved_of(kind) for kind in kinds}


def interleaved_of(kind: str) -> dict[str, Any]:
    """Run two micro-batches before either's backward pass, in any order, and after forward-only replays."""
    model, forward = recomputing(kind)
    batches = {"a": (tokens(1), random_trace(5)), "b": (tokens(2), random_trace(6))}
    alone = {name: replayed(model, forward, *batch)[1] for name, batch in batches.items()}
    assert not same(alone["a"], alone["b"])
    found: dict[str, Any] = {}

    def outputs() -> dict[str, Tensor]:
        made = {}
        for name, (ids, trace) in batches.items():
            with replay_routing(model, trace):
                made[name] = forward(ids)
        return made

    for order in ("ab", "ba"):
        made = outputs()
        found[order] = []
        for name in order:
            loss_of(made[name]).backward()
            found[order].append(same(gradients(model), alone[name]))
    made = outputs()
    (loss_of(made["a"]) + loss_of(made["b"])).backward()
    together = gradients(model)
    whole, a, b = (torch.cat([g[n].flatten() for n in together]) for g in (together, alone["a"], alone["b"]))
    found["one_backward"] = float((whole - a - b).norm() / whole.norm())
    found["apart"] = float((a - b).norm() / whole.norm())
    # Forward-only passes, whose routes nobody consumes in a backward pass.
    for ids, trace in batches.values():
        with torch.no_grad(), replay_routing(model, trace):
            run(model, ids)
    found["after_forward_only"] = same(replayed(model, forward, *batches["a"])[1], alone["a"])
    # A backward pass while the next micro-batch's context is open, and one inside its own.
    with replay_routing(model, batches["a"][1]):
        first = forward(batches["a"][0])
    with replay_routing(model, batches["b"][1]) as replay:
        second = forward(batches["b"][0])
        loss_of(first).backward()
        found["inside_next"] = same(gradients(model), alone["a"])
        loss_of(second).backward()
        found["inside_own"] = same(gradients(model), alone["b"])
    found["forwards"] = replay.forwards
    # Native routing after replay is native, and a native forward's recomputation too.
    loss_of(forward(batches["a"][0])).backward()
    native = gradients(model)
    pending = forward(batches["a"][0])
    with replay_routing(model, batches["b"][1]):
        forward(batches["b"][0])
        loss_of(pending).backward()
    found["native_stays_native"] = same(gradients(model), native) and not same(native, alone["a"])
    return found


@alone
def other_tokens(kinds: list[str]) -> dict[str, Any]:
    """Run other passes in a replay's context, each of which the model has to route as it does by itself."""
    return {kind: other_tokens_of(kind) for kind in kinds}


def other_tokens_of(kind: str) -> dict[str, Any]:
    """Do so under one way to recompute."""
    model, forward = recomputing(kind)
    ids, altered = tokens(1), tokens(1)
    altered[0, 2] = (altered[0, 2] + 1) % 64
    with torch.no_grad(), record_routing(model) as recording:
        run(model, ids)
    trace = replace(recording.trace, parts=random_trace(5).parts)  # routes that the model would not choose
    positions = torch.arange(SEQUENCE)[None].expand(BATCH, -1)
    seeing = torch.zeros(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    packed = torch.triu(torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool), 1)
    passes: dict[str, Callable[[], Tensor]] = {
        "altered": lambda: forward(altered),
        "rows": lambda: forward(ids.flip(0)),
        "seeing": lambda: model(ids, positions, seeing),
        "packed": lambda: model(ids.view(1, -1), torch.arange(ROWS)[None], packed),
    }

    def both(run_pass: Callable[[], Tensor]) -> tuple[Tensor, Any]:
        output = run_pass()
        loss_of(output).backward()
        return output.detach(), gradients(model)

    plain = {name: both(each) for name, each in passes.items()}
    expected = replayed(model, forward, ids, trace)
    found: dict[str, Any] = {}
    with chosen(model) as maps, replay_routing(model, trace, others="native") as replay:
        for name, each in passes.items():
            output, own = both(each)
            found[name] = torch.equal(output, plain[name][0]) and same(own, plain[name][1])
        output, own = both(lambda: forward(ids))
    wanted = expected_maps(trace)
    found["replayed"] = torch.equal(output, expected[0]) and same(own, expected[1])
    found["obeyed"] = all(torch.equal(maps[layer][-1], each) for layer, each in wanted.items())
    found["counts"] = [replay.forwards, replay.others]

    def attempt(others: str) -> float:
        with replay_routing(model, trace, others=others):
            return float(forward(altered).sum())

    def without() -> float:
        with proving_replay(model, replace(trace, tokens=None, starts=None)):
            return float(forward(ids).sum())

    found["refused"], found["only"], found["unknown"] = (
        refused(each) for each in (lambda: attempt("refuse"), lambda: attempt("native"), without)
    )
    return found


@alone
def leaks(kinds: list[str]) -> dict[str, Any]:
    """Look for what a replay leaves behind, after success and after failure."""
    return {kind: leaks_of(kind) for kind in kinds}


def leaks_of(kind: str) -> dict[str, Any]:
    """Look for what a replay leaves behind, after success and after failure."""
    model, forward = recomputing(kind)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    routers = [layer.mlp.router for layer in model.decoder.layers]
    module: Any = torch_checkpoint
    symbols = (module.CheckpointFunction, module._checkpoint_without_reentrant_generator)
    trace = random_trace(5)
    alive = weakref.ref(trace)
    with replay_routing(model, trace):
        output = forward(tokens(1))
    del trace
    gc.collect()
    held = alive() is not None
    loss_of(output).backward()
    del output
    gc.collect()
    failure = refused(lambda: replayed(model, forward, tokens(1), random_trace(5, rows=ROWS - 1)))
    return {
        "held_by_the_graph": held,
        "freed_after_backward": alive() is None,
        "failure": failure,
        "model_is_as_before": {name: set(vars(module)) for name, module in model.named_modules()} == before
        and all(router.router_replay is None for router in routers),
        "torch_is_as_before": symbols == (module.CheckpointFunction, module._checkpoint_without_reentrant_generator),
    }


@alone
def order() -> dict[str, Any]:
    """Tell batch-first from sequence-first by routes of each sample alone, and use padding masks and packed rows."""
    model, ids = build(), tokens(1)
    with torch.no_grad():
        with record_routing(model) as recording:
            both = run(model, ids)
        alone = []
        for sample in range(BATCH):
            with record_routing(model) as single:
                run(model, ids[sample : sample + 1], batch=1)
            alone.append(single.trace.experts)
        with record_routing(model) as twice:
            run(model, ids)
            run(model, ids[:1], batch=1)
        # As an engine delivers them: a trace per sample, without the last token's row; sample 1 is padded by 3.
        traces = [
            RoutingTrace(parts=(part[: n - 1],), layers=(0, 1, 2, 3), num_experts=EXPERTS)
            for part, n in zip(random_trace(5).experts.split(SEQUENCE), (SEQUENCE, SEQUENCE - 3), strict=True)
        ]
        attention = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
        attention[1, -3:] = 0
        trace, mask = align(traces, attention)
        with chosen(model) as maps, replay_routing(model, trace, mask, native=True) as replay:
            run(model, ids)
        wanted, own = expected_maps(trace), expected_maps(replay.native)
        sequence_first = mask.view(BATCH, SEQUENCE).t().reshape(-1)
        mixed = {layer: torch.where(sequence_first[:, None], wanted[layer], own[layer]) for layer in wanted}
        # A packed micro-batch is one row.
        packed = ids.view(1, -1)
        with chosen(model) as packed_maps, replay_routing(model, random_trace(6)):
            positions = torch.arange(ROWS)[None]
            causal = torch.triu(torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool), 1)
            model(packed, positions, causal)
    return {
        "rows_are_batch_first": torch.equal(recording.trace.experts, torch.cat(alone)),
        "samples_differ": not torch.equal(alone[0], alone[1]),
        "two_forwards_in_order": torch.equal(twice.trace.experts, torch.cat([*alone, alone[0]])),
        "finite": bool(torch.isfinite(both).all()),
        "masked": all(torch.equal(maps[layer][0], mixed[layer]) for layer in maps),
        "native_differs": any(not torch.equal(wanted[layer], own[layer]) for layer in wanted),
        "counts": [replay.forwards, replay.rows, replay.native_rows, int((~mask).sum())],
        "packed": all(
            torch.equal(packed_maps[layer][0], each) for layer, each in expected_maps(random_trace(6), batch=1).items()
        ),
    }


@alone
def layers() -> dict[str, Any]:
    """Number the MoE layers of models with dense layers and with multi-token prediction."""
    warnings.simplefilter("ignore")
    mixed = build(moe_layer_freq=[0, 1, 0, 1])
    with torch.no_grad(), record_routing(mixed) as recording:
        run(mixed, tokens(1))
    trace = random_trace(5, layers=(1, 3))
    with chosen(mixed) as maps, replay_routing(mixed, trace):
        loss_of(run(mixed, tokens(1))).backward()
    predicting = build(mtp_num_layers=1)
    from megatron.core.transformer.moe.router import TopKRouter

    routers = [name for name, module in predicting.named_modules() if isinstance(module, TopKRouter)]
    ids = tokens(1)
    positions = torch.arange(SEQUENCE)[None].expand(BATCH, -1)
    causal = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    four = random_trace(5)
    with replay_routing(predicting, four):
        # Of the decoder's routers alone: those of multi-token prediction carry the same numbers.
        with chosen(predicting.decoder) as predicted:
            loss = predicting(ids, positions, causal, labels=ids, loss_mask=torch.ones(BATCH, SEQUENCE))
    loss.mean().backward()
    return {
        "dense_skipped": list(moe_layout(mixed).layers),
        "recorded_layers": list(recording.trace.layers),
        "dense_replayed": sorted(maps)
        and all(torch.equal(maps[layer][0], each) for layer, each in expected_maps(trace).items()),
        "mtp_routers": sum(name.startswith("mtp.") for name in routers),
        "mtp_layers": list(moe_layout(predicting).layers),
        "mtp_replayed": all(torch.equal(predicted[layer][0], each) for layer, each in expected_maps(four).items()),
    }


@alone
def statistics() -> dict[str, Any]:
    """Look at what megatron derives from routes: the load that moves expert biases, and the auxiliary loss."""
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    ids, trace = tokens(1), random_trace(5)
    wanted = {layer: each.sum(0).float() for layer, each in expected_maps(trace).items()}
    loads = {}
    for kind in ("none", "uniform", "moe"):
        model, forward = recomputing(kind, **FORMULA["sigmoid-bias-groups"])
        replayed(model, forward, ids, trace)
        counted = {layer.layer_number - 1: layer.mlp.router.local_tokens_per_expert for layer in model.decoder.layers}
        loads[kind] = all(torch.equal(counted[layer], wanted[layer]) for layer in wanted)
    model = build(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01)
    first_layer = []
    for replaying in (False, True):
        get_moe_layer_wise_logging_tracker().clear()
        if replaying:
            replayed(model, lambda ids: run(model, ids), ids, trace)
        else:
            loss_of(run(model, ids)).backward()
        first_layer.append(float(get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"][0]))
    return {"loads": loads, "auxiliary_loss": first_layer}


@alone
def record(path: str) -> dict[str, Any]:
    """Record on one rank, for a replay on two."""
    model = build()
    with torch.no_grad(), record_routing(model) as recording:
        output = run(model, tokens(1))
    save_traces(path, [recording.trace])
    return {"rows": recording.trace.rows, "loss": float(loss_of(output))}
