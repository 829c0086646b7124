"""Routes through verl's FSDP engine: recorded, replayed, laid out in micro-batches, wrong, and shared by ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.torch.shards import named_pieces, named_shards
from mismatch_ext.adapters.transformers.routing import moe_layout
from mismatch_ext.adapters.verl.bad_rows import BAD, FAULT, JUDGED, marks
from mismatch_ext.adapters.verl.replay import _mark
from mismatch_ext.adapters.verl.rollout.digests import with_digests, without_digests
from safetensors.torch import load_file
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import response_from_nested

from mismatch_ext.precision.readiness import ReadinessReport, scan_weights
from mismatch_ext.weights import Piece, added, compare_sums, sums_of
from tests.peers.forks import on_ranks as ranks
from tests.peers.verl.in_process.routes import as_rollout, nested, other, refused
from tests.peers.verl.in_process.scenarios_training import overflowing
from tests.peers.verl.in_process.workers import (
    PROMPTS,
    R2,
    R3,
    RESPONSES,
    batch,
    logprobs,
    parameters,
    scored,
    strategy,
    update,
    whole,
    worker,
)

TOKENS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


@contextlib.contextmanager
def experts_seen(built: Any) -> Iterator[list[Tensor]]:
    """Collect the ids that the experts of the first MoE layer are handed, forward pass after forward pass."""
    layout = moe_layout(built.engine.module)
    seen: list[Tensor] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        found = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not a.is_floating_point()]
        seen.extend(a.detach().clone() for a in found if a.shape[-1] == layout.top_k)

    handle = layout.routers[0].experts.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def own_routes(model: str, samples: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
    """Return what the model itself chooses, as a rollout engine would report it."""
    return as_rollout(scored(worker(model, {"routing": R2}), batch(samples))["routed_experts"])


def own_routes_whole(model: str) -> Tensor:
    """Return the model's own routes of eight samples, recorded in one forward pass."""
    return as_rollout(scored(worker(model, {"routing": R2}, micro_batch=8), batch(range(8)))["routed_experts"])


def changed(data: TensorDict) -> TensorDict:
    """Return a batch with another first token in the second sample's `input_ids`, all else as it was."""
    rows = [row.clone() for row in data["input_ids"].unbind()]
    rows[1][0] = (rows[1][0] + 1) % 16
    data = data.clone()
    data["input_ids"] = nested(rows)
    return data


def trained(built: Any, data: TensorDict, updates: int = 1) -> dict[str, Any]:
    """Score a batch and learn from it; return all that came of it."""
    data = scored(built, data)
    metrics = [update(built, data) for _ in range(updates)]
    return {
        "logprobs": [row.tolist() for row in data["old_log_probs"].unbind()],
        "grad_norm": [float(m["grad_norm"][0]) for m in metrics],
        "lr": [m["lr"] for m in metrics],
        "parameters": parameters(built),
        "keys": sorted(metrics[0]),
    }


def stock(model: str) -> dict[str, Any]:
    """Check that ours is verl's engine without a block and with one that measures, bit for bit; return what it computes."""
    routes = own_routes(model)
    verl = worker(model, vendor=None)
    expected = trained(verl, batch(rollout=routes), 3)
    assert type(verl.engine).__name__ == "FSDPEngineWithLMHead" and expected["grad_norm"][0] > 0
    for block in (None, {}):
        ours = worker(model, block)
        assert type(ours.engine).__name__ == "MismatchFSDPEngine"
        assert trained(ours, batch(rollout=routes), 3) == expected, block
    return expected


def replay(model: str) -> None:
    """Compare native, recorded and replayed passes and updates, whole and checkpointed."""
    native = trained(worker(model, vendor=None), batch())
    recorded = worker(model, {"routing": R2})
    assert trained(recorded, batch()) == native
    assert recorded.engine.mismatch_metrics()["routing/set_mismatch_frac"] == 0
    routes = own_routes(model)
    built = worker(model, {"routing": R3})
    assert trained(built, batch(rollout=routes)) == native
    assert built.engine.mismatch_metrics()["routing/set_mismatch_frac"] == 0
    given, found = other(routes), {}
    for checkpointing in (False, True):
        built = worker(model, {"routing": R3}, enable_gradient_checkpointing=checkpointing)
        with experts_seen(built) as seen:
            found[checkpointing] = trained(built, batch(rollout=given))
        # Padded to 14 tokens. verl's rows of zeros for the last sampled token are no routes.
        handed = seen[0].view(4, max(TOKENS), -1)
        for ids, row, count in zip(handed, given.unbind(), TOKENS, strict=True):
            assert ids[: count - 1].tolist() == row[:-1, 0].tolist()
            assert (
                len(set(ids[count - 1].tolist())) == 4
            )  # the first layer chooses for the last token as without replay
        frac = built.engine.mismatch_metrics()["routing/native_rows_frac"]
        assert abs(frac - 4 / sum(TOKENS)) < 1e-9
    assert found[True] == found[False]
    assert apart(found[True]["logprobs"], native["logprobs"]) > 0.1
    asked = (tu.assign_non_tensor(data, mismatch_native=True) for data in (batch(rollout=given), batch()))
    first, second = (logprobs(built, data) for data in asked)
    assert first == second  # a pass that asks for the model's own routing gets it


def apart(one: list[list[float]], two: list[list[float]]) -> float:
    """Return the largest difference between two lists of rows."""
    return max(abs(a - b) for rows in zip(one, two, strict=True) for a, b in zip(*rows, strict=True))


def mean_apart(one: list[list[float]], two: list[list[float]]) -> float:
    """Return the mean difference between two lists of rows."""
    pairs = [pair for rows in zip(one, two, strict=True) for pair in zip(*rows, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def other_tokens(model: str) -> None:
    """Check that altered samples beside the batch are scored natively, and never trained on."""
    routes = other(own_routes(model))
    altered = logprobs(worker(model, vendor=None), changed(batch()))
    for mode, packed in itertools.product(("R3", "R2"), (False, True)):
        built = worker(model, {"routing": {"mode": mode, "measured": 1.0}}, use_remove_padding=packed)
        data = scored(built, batch(rollout=routes) if mode == "R3" else batch())
        assert apart(logprobs(built, changed(data)), altered) < 2e-6
        said = refused(update, built, changed(data))
        assert "its token ids are others than those that its routes were recorded of (1 of 4 samples)" in said
        assert built.engine.mismatch_metrics()["routing/other_passes"] == 1.0


def judged(model: str) -> None:
    """Score a batch of which one sample has other tokens and one has an id out of range, and update it without the two."""
    routes = other(own_routes(model))
    good = batch(rollout=routes)
    data = changed(good)
    given = [row.clone() for row in data["routed_experts"].unbind()]
    given[2][2, 1, 0] = 16
    data["routed_experts"] = nested(given)
    for packed in (False, True):
        built = worker(model, {"routing": R3}, use_remove_padding=packed)
        expected = logprobs(built, good)
        assert FAULT not in built.infer_batch(tu.assign_non_tensor(good.clone(), **{JUDGED: True})).keys()
        output = built.infer_batch(tu.assign_non_tensor(data.clone(), **{JUDGED: True}))
        assert [sorted(set(row.tolist())) for row in output[FAULT].unbind()] == [[0], [3], [3], [0]]
        scores = list(response_from_nested(output["log_probs"], data["response_mask"]).unbind())
        # Experts multiply the tokens of all samples together, so that rounding depends on the others' routes.
        for row in (0, 3):
            assert apart([scores[row].tolist()], [expected[row]]) < 1e-5
        marked = data.clone()
        marked[BAD] = marks([False, True, True, False])
        marked["old_log_probs"] = nested([row.float() for row in scores])
        # Without the marks of the driver, an update of the same samples is refused.
        said = refused(update, built, marked.exclude(BAD))
        assert said.startswith("RoutingError: request 1 of rank 0's mini-batch"), said
        assert refused(update, built, marked) == "nothing was refused"


def unhooked(model: str) -> None:
    """Score and update with an engine of verl's that runs its micro-batches without our `forward_step`."""
    built = worker(model, {"routing": R3})
    data = scored(built, batch(rollout=other(own_routes(model))))
    before = parameters(built)
    built.engine.forward_step = partial(FSDPEngineWithLMHead.forward_step, built.engine)
    for said in (refused(built.infer_batch, data.clone()), refused(update, built, data)):
        assert said.startswith(
            "ReplayError: mismatch.routing: verl's engine ran 4 of 4 samples without its forward_step"
        )
    assert before == parameters(built)
    del built.engine.forward_step
    assert refused(update, built, data) == "nothing was refused"


def adapter(model: str) -> None:
    """Score with an adapter, whose base is the reference: verl switches the adapter off for that pass."""
    complete = other(scored(worker(model, {"routing": R2}), batch())["routed_experts"])
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    data, found = batch(rollout=as_rollout(complete)), {}
    for wanted in (False, True):
        built = worker(model, {"routing": {"mode": "R3", "reference": wanted}}, **lora)
        base = built.infer_batch(tu.assign_non_tensor(data.clone(), no_lora_adapter=True))
        assert "routed_experts" not in base.keys()
        scores = response_from_nested(base["log_probs"], data["response_mask"])
        found[wanted] = [row.tolist() for row in scores.unbind()]
        own = logprobs(built, data)
    # An adapter that has not been trained changes nothing.
    assert found[True] == own and apart(found[False], own) > 0.1
    sent = refused(lambda: len(built.engine.get_per_tensor_param(base_sync_done=True)[0]))
    # PEFT finds no adapter in FSDP1's flat weights.
    assert ("would send the rollout an empty one" in sent) == (strategy() == "fsdp"), sent
    update(built, scored(built, data))
    assert apart(logprobs(built, data), own) > 0


def layouts(model: str) -> dict[str, Any]:
    """Replay other routes in micro-batches of several shapes: whole, dynamic, packed, packed and filled up."""
    routes = other(own_routes(model, range(8)))
    found: dict[str, Any] = {}
    for name, options in {
        "whole": {"micro_batch": 4},
        "dynamic": {"tokens": 24},
        "packed_dynamic": {"tokens": 24, "use_remove_padding": True},
        "packed_filled": {
            "micro_batch": 4,
            "use_remove_padding": True,
            "engine": {"pad_to_length": True, "pad_to_length_bucket": 64},
        },
    }.items():
        built = worker(model, {"routing": R3}, **options)
        with experts_seen(built) as seen:
            data = scored(built, batch(range(8), rollout=routes))
        handed = Counter(tuple(row) for ids in seen for row in ids.flatten(0, -2).tolist())
        asked = Counter(tuple(row[0].tolist()) for sample in routes.unbind() for row in sample[:-1])
        metrics = update(built, data, mini_batch=4, epochs=2, shuffle=True)
        found[name] = {
            "logprobs": [row.tolist() for row in data["old_log_probs"].unbind()],
            "grad_norm": [float(value) for value in metrics["grad_norm"]],
            "missing": (asked - handed).total(),
            **built.engine.mismatch_metrics(),
        }
    native = worker(model, vendor=None)
    found["native"] = logprobs(native, batch(range(8)))
    recorded = worker(model, {"routing": R2}, tokens=24, optimizer={"lr": 0.0})
    data = scored(recorded, batch(range(8)))
    found["r2_dynamic"] = [row.tolist() for row in as_rollout(data["routed_experts"]).unbind()]
    found["r2_whole"] = [row.tolist() for row in own_routes_whole(model).unbind()]
    metrics = update(recorded, data, mini_batch=4, epochs=2, shuffle=True)
    found["r2_update"] = {"grad_norm": [float(v) for v in metrics["grad_norm"]], **recorded.engine.mismatch_metrics()}
    return found


def faults(model: str) -> dict[str, Any]:
    """Hand the engine routes that are wrong for one sample, and return what it says; no weight may have changed."""
    routes = [row.clone() for row in own_routes(model).unbind()]
    built = worker(model, {"routing": R3})
    before = parameters(built)
    uids = ["a", "b", "c", "d"]

    def tried(number: int, change: Any, **fields: Any) -> str:
        given = list(copy.deepcopy(routes))
        given[number] = change(given[number])
        data = batch(rollout=nested(given), **fields)
        data["old_log_probs"] = nested([torch.zeros(n) for n in RESPONSES])
        tu.assign_non_tensor(data, uid=uids)
        return refused(update, built, data)

    def put(row: Tensor, index: Any, value: Any) -> Tensor:
        row[index] = torch.as_tensor(value, dtype=row.dtype)
        return row

    natively = batch()
    natively["old_log_probs"] = nested([torch.zeros(n) for n in RESPONSES])
    found = {
        "zero": tried(2, torch.zeros_like),
        "short": tried(0, lambda row: row[:-3]),
        "zeros_from": tried(0, lambda row: put(row, slice(9, None), 0)),
        "range": tried(1, lambda row: put(row, (2, 1, 0), 16)),
        "layer": tried(3, lambda row: put(row, (slice(None), 1), 0)),
        "gone": refused(update, built, natively),
    }
    # Layers swapped in all samples: only the model can tell, before it has had routes that are its own.
    swapped = nested([row.flip(1) for row in routes])
    found["swapped"] = refused(built.infer_batch, batch(rollout=swapped))
    # Of long samples too, routes of other tokens at the end alone are none that a pass has judged.
    ends = [torch.from_numpy(with_digests(np.zeros((200, 1, 8)), [0] * 199 + [last])) for last in (3, 4)]
    assert _mark(torch.zeros(200), ends[0]) != _mark(torch.zeros(200), ends[1])
    # A pass that is asked to judges the samples, and altered routes have not seen it.
    built.infer_batch(tu.assign_non_tensor(batch(rollout=nested(list(routes))), **{JUDGED: True}))
    found["range_judged"] = tried(1, lambda row: put(row, (2, 1, 0), 16))
    assert before == parameters(built)
    # What has no loss needs no routes: samples that fill up a batch, and what an agent loop adds at the end.
    masks = [torch.ones(n, dtype=torch.long) for n in RESPONSES]
    masks[2][:] = 0
    filled = {"loss_mask": nested(masks), "response_mask": nested(masks)}
    found["filler"] = tried(2, torch.zeros_like, **filled)
    masks = [torch.ones(n, dtype=torch.long) for n in RESPONSES]
    masks[0][4:] = 0
    ends = {"loss_mask": nested(masks), "response_mask": nested(masks)}
    found["tool_answer"] = tried(0, lambda row: put(row, slice(9, None), 0), **ends)
    found |= moved(built, nested(routes), uids)
    # From here on the engine has sent weights, of version 3.
    built.engine.replay.weight_version = 3
    found["of_nobody"] = tried(0, torch.clone)
    for name, spans in (
        ("of_present", [(3, 3)] * 4),
        ("of_older", [(3, 3), (2, 2), (3, 3), (3, 3)]),
        ("of_two", [(3, 3), (3, 3), (2, 3), (3, 3)]),
    ):
        stamps = [{"min_global_steps": first, "max_global_steps": last} for first, last in spans]
        found[name] = tried(0, torch.clone, extra_fields=NonTensorStack(*stamps))
    return found


def moved(built: Any, routes: Tensor, uids: list[str]) -> dict[str, str]:
    """Hand the engine routes that are right for other tokens, as agent loops and batches may that move them by position."""
    good = batch(rollout=routes)
    good["old_log_probs"] = nested([torch.zeros(n) for n in RESPONSES])
    tu.assign_non_tensor(good, uid=uids)
    rows = list(good["routed_experts"].unbind())

    def changed(**fields: Any) -> TensorDict:
        data = good.clone()
        for name, parts in fields.items():
            data[name] = nested(parts)
        return data

    # As verl's worker lays routes out: a row for each token.
    given = torch.cat([rows[1], rows[1].new_zeros(2, *rows[1].shape[1:])]), rows[0][:12], *rows[2:]
    plain = [without_digests(row) for row in rows]
    ids = [row.clone() for row in good["input_ids"].unbind()]
    ids[1][8] = 3 + (ids[1][8] - 2) % 13
    again = {"input_ids": ids, "responses": [row[-count:] for row, count in zip(ids, RESPONSES, strict=True)]}
    last = [row.clone() for row in good["loss_mask"].unbind()]
    last[1][-4:] = 0
    return {
        "good": refused(update, built, good),
        "of_another_sample": refused(update, built, changed(routed_experts=given)),
        "of_no_tokens": refused(update, built, changed(routed_experts=plain)),
        "encoded_again": refused(update, built, changed(**again)),
        "encoded_again_scored": refused(built.infer_batch, changed(**again)),
        "encoded_again_without_loss": refused(update, built, changed(**again, loss_mask=last)),
    }


def reference(model: str) -> None:
    """Score with a reference engine, which replays only where it was asked to."""
    routes = other(own_routes(model))
    native = logprobs(worker(model, vendor=None), batch())
    off = worker(model, {"routing": R3}, engine={"forward_only": True})
    assert logprobs(off, batch(rollout=routes)) == native
    on = worker(model, {"routing": {**R3, "reference": True}}, engine={"forward_only": True})
    replayed = logprobs(on, batch(rollout=routes))
    assert apart(replayed, native) > 0.1
    assert replayed == logprobs(worker(model, {"routing": R3}), batch(rollout=routes))
    # What the reference would choose says nothing about the gap between rollout and trainer.
    assert "routing/compared_tokens" not in on.engine.mismatch_metrics()


def share(routes: list[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Return this rank's samples of eight, and their routes."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = list(range(8))[rank * 8 // world : (rank + 1) * 8 // world]
    return mine, [routes[number] for number in mine]


def everywhere(value: Any) -> list[Any]:
    """Return every rank's value."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def write_routes(model: str, path: str) -> str:
    """Write routes of eight samples, which are not the model's own, for ranks to share."""
    torch.save(list(other(own_routes(model, range(8))).unbind()), path)
    return path


def sharded(model: str, routes: str) -> dict[str, Any]:
    """Score and update eight samples that the ranks share, with R3 and with R2."""
    found: dict[str, Any] = {}
    given = torch.load(routes)
    for mode in ("R3", "R2"):
        # FSDP1 says whose gradient is where only with the original parameters.
        built = worker(
            model, {"routing": {"mode": mode, "measured": 1.0}}, engine={"use_orig_params": strategy() == "fsdp"}
        )
        mine, rows = share(given)
        data = batch(mine, rollout=nested(rows)) if mode == "R3" else batch(mine)
        data = scored(built, data)
        gradients = kept_gradients(built)
        update(built, data)
        metrics = built.engine.mismatch_metrics()
        found[mode] = {
            "logprobs": sum(everywhere([row.tolist() for row in data["old_log_probs"].unbind()]), []),
            "routes": sum(everywhere([row.tolist() for row in data["routed_experts"].unbind()]), []),
            "counts": [metrics[name] for name in COUNTS],
            "gradients": gradients,
        }
    return found


COUNTS = ("routing/compared_tokens", "routing/set_mismatch_frac", "routing/other_passes")


def kept_gradients(built: Any) -> dict[str, Tensor]:
    """Return what fills with the whole gradients of the next step."""
    gradients: dict[str, Tensor] = {}
    built.engine.optimizer.register_step_pre_hook(lambda *_: gradients.update(gathered_gradients(built.engine.module)))
    return gradients


def check_same(found: dict[str, Any], one: dict[str, Any], apart_at_most: float, gradients_apart: float) -> None:
    """Check that ranks have computed what one rank does."""
    for mode, alone in one.items():
        assert apart(found[mode]["logprobs"], alone["logprobs"]) <= apart_at_most, mode
        assert found[mode]["routes"] == alone["routes"] and found[mode]["counts"] == alone["counts"], mode
        assert found[mode]["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in alone["gradients"].items():
            assert torch.isfinite(gradient).all()
            torch.testing.assert_close(found[mode]["gradients"][name], gradient, rtol=0, atol=gradients_apart)


def on_two_ranks(model: str, routes: str) -> None:
    """Check that two ranks replay as one does."""
    with tempfile.TemporaryDirectory() as folder:
        (one,), (two, _) = (ranks(sharded_to_file, world, model=model, routes=routes, out=folder) for world in (1, 2))
        one, two = torch.load(one), torch.load(two)
    assert apart(one["R3"]["logprobs"], one["R2"]["logprobs"]) > 0.1
    check_same(two, one, 0.0, 1e-6)


def gathered_gradients(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole gradient of each weight, which ranks may share."""
    if strategy() != "fsdp":
        for name, parameter in module.named_parameters():
            yield name, whole(parameter.grad).clone()
        return
    with FullyShardedDataParallel.summon_full_params(module, writeback=False, with_grads=True):
        for name, parameter in module.named_parameters():
            yield name, parameter.grad.detach().clone()


def shards(model: str) -> None:
    """Put every rank's shards of the weights together again, and scan them with one value too large on each."""
    checkpoint = load_file(Path(model) / "model.safetensors")
    for orig in (False, True) if strategy() == "fsdp" else (False,):
        module = worker(model, {}, engine={"use_orig_params": orig}).engine.module
        parts: dict[str, list[Tensor]] = {}
        for own in everywhere([(name, part.flatten().tolist()) for name, part in named_shards(module)]):
            for name, values in own:
                parts.setdefault(name, []).append(torch.tensor(values))
        assert parts.keys() == checkpoint.keys()
        for name, tensor in checkpoint.items():
            assert torch.equal(torch.cat(parts[name]), tensor.flatten().float()), name
        check_sums(module, checkpoint)
        *_, (name, part) = named_shards(module)
        with torch.no_grad():
            part.view(-1)[-1] = 1e6
        report = ReadinessReport(weights=scan_weights(named_shards(module), "float16"), activations=[], dtype="float16")
        assert [f" {name} (max 1e+06)" in reason for reason in report.reasons] == [True]


def check_sums(module: Any, checkpoint: dict[str, Tensor]) -> None:
    """Check that what the ranks' parts add up to is the whole, but where FSDP1 does not say which parts they are."""
    pieces = dict(named_pieces(module))
    sums = added(everywhere({name: sums_of(piece, torch.float16) for name, piece in pieces.items()}))
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.items()}
    held = {
        name: sums_of(Piece(values=tensor.reshape(-1), start=0, shape=shapes[name]), torch.float16)
        for name, tensor in checkpoint.items()
    }
    compared = compare_sums(held, sums, {}, shapes)
    assert all(one.equal for one in compared) and len(compared) in (0, len(checkpoint))


def rank_faults(moe: str, dense: str, routes: str) -> None:
    """Lose a sample's routes on the last rank, then let a gradient overflow there alone."""
    built = worker(moe, {"routing": R3})
    mine, rows = share(torch.load(routes))
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    if last:
        rows[1] = torch.zeros_like(rows[1])
    lost = everywhere(refused(built.infer_batch, batch(mine, rollout=nested(rows))))
    assert lost[0].startswith("RoutingError: rank 1: request 1 of rank 1's mini-batch: routing has 0 rows")
    assert lost[1].startswith("RoutingError: request 1 of rank 1's mini-batch: routing has 0 rows")
    built = worker(dense, {"precision": {"dtype": "float16", "init_scale": 1024.0}}, dtype="float16")
    data = scored(built, batch(mine))
    update(built, data)
    before = parameters(built)
    with overflowing(built.engine, last):
        update(built, data)
    assert before == parameters(built)
    assert built.engine.scaler.get_scale() == 512.0 and built.engine.lr_scheduler.last_epoch == 1
    assert built.engine.mismatch_metrics()["skipped_steps"] == 1


def on_two(scenario: str, **payload: Any) -> None:
    """Run `shards` or `rank_faults` on two ranks."""
    ranks(globals()[scenario], 2, **payload)


def sharded_to_file(model: str, routes: str, out: str) -> str:
    """Run `sharded`, and return the file that has what was found."""
    found = sharded(model, routes)
    path = f"{out}/{torch.distributed.get_world_size()}-{torch.distributed.get_rank()}.pt"
    torch.save(found, path)
    return path
