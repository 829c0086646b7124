"""Routes through verl's FSDP engine: recorded, replayed, laid out in micro-batches, wrong, and shared by ranks."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters import compat
from mismatch_ext.adapters.torch.shards import named_pieces, named_shards
from mismatch_ext.adapters.transformers.routing import moe_layout
from mismatch_ext.adapters.verl.bad_rows import BAD, FAULT, JUDGED, marks
from mismatch_ext.adapters.verl.rollout.digests import without_digests
from safetensors.torch import load_file
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import response_from_nested

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import UntestedVersionWarning
from mismatch_ext.precision.readiness import ReadinessReport, scan_weights
from mismatch_ext.weights import Piece, added, compare_sums, sums_of
from tests.peers.forks import on_ranks
from tests.peers.verl.in_process.routes import as_rollout, carrying, nested, other, refused
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


def missing(asked: Counter[tuple[int, ...]], seen: list[Tensor]) -> int:
    """Count the routes that were asked for and that no token was sent along."""
    return (asked - Counter(tuple(row) for ids in seen for row in ids.flatten(0, -2).tolist())).total()


def own_routes(model: str, samples: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
    """Return what the model itself chooses, as a rollout engine would report it."""
    return as_rollout(scored(worker(model, {"routing": R2}), batch(samples))["routed_experts"])


def own_routes_whole(model: str) -> Tensor:
    """Return the model's own routes of eight samples, recorded in one forward pass."""
    return as_rollout(scored(worker(model, {"routing": R2}, micro_batch=8), batch(range(8)))["routed_experts"])


def stock(model: str) -> dict[str, Any]:
    """Run verl's engine, and ours without a block, and ours with a block that measures only."""
    found = {}
    for name, vendor, block in (("verl", None, None), ("ours", "mismatch", None), ("monitor", "mismatch", {})):
        built = worker(model, block, vendor=vendor)
        data = scored(built, batch())
        metrics = [update(built, data) for _ in range(3)]
        found[name] = {
            "class": type(built.engine).__name__,
            "logprobs": [row.tolist() for row in data["old_log_probs"].unbind()],
            "grad_norm": [float(m["grad_norm"][0]) for m in metrics],
            "lr": [m["lr"] for m in metrics],
            "parameters": parameters(built),
            "keys": sorted(metrics[0]),
        }
    return found


def of_versions(model: str, newer: dict[str, str]) -> dict[str, Any]:
    """Record and replay checkpointed passes while the metadata, and nothing else, says that peers are of other versions."""
    real, block = metadata.version, {"routing": R2}
    with (
        mock.patch.object(metadata, "version", lambda name: newer.get(name) or real(name)),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        # As verl's worker does, in its process.
        parsed = MismatchConfig.parse(block)
        assert parsed is not None
        found: dict[str, Any] = {"versions": compat.check(("verl", "torch", "transformers"), parsed.features, {"verl"})}
        built = worker(model, block, enable_gradient_checkpointing=True)
        data = scored(built, batch())
        metrics = [update(built, data) for _ in range(2)]
    told = [str(one.message) for one in caught if issubclass(one.category, UntestedVersionWarning)]
    return {
        **found,
        "told": told,
        "logprobs": [row.tolist() for row in data["old_log_probs"].unbind()],
        "grad_norm": [float(m["grad_norm"][0]) for m in metrics],
        "parameters": parameters(built),
    }


def replay(model: str) -> dict[str, Any]:
    """Compare native, recorded and replayed passes and updates, whole and checkpointed."""
    native = worker(model, vendor=None)
    data = scored(native, batch())
    found: dict[str, Any] = {"native": [row.tolist() for row in data["old_log_probs"].unbind()]}
    update(native, data)
    found["native_parameters"] = parameters(native)

    recorded = worker(model, {"routing": R2})
    data = scored(recorded, batch())
    found["r2"] = [row.tolist() for row in data["old_log_probs"].unbind()]
    found["r2_dtype"] = str(data["routed_experts"].dtype)
    update(recorded, data)
    found["r2_parameters"], found["r2_metrics"] = parameters(recorded), recorded.engine.mismatch_metrics()
    altered = [row.clone() for row in data["routed_experts"].unbind()]
    altered[1][2, 1, 0] = 16
    # As a driver would ask that has had sampling masks judged, of which routes that this engine recorded were no part.
    asked = tu.assign_non_tensor(data.clone(), **{JUDGED: True})
    asked["routed_experts"] = nested(altered)
    found["r2_range"] = refused(update, recorded, asked)
    found["r2_lost"] = refused(update, recorded, data.exclude("routed_experts"))

    routes = as_rollout(data["routed_experts"])
    for name, given in (("own", routes), ("other", other(routes))):
        for checkpointing in (False, True):
            built = worker(model, {"routing": R3}, enable_gradient_checkpointing=checkpointing)
            data = batch(rollout=given)
            with experts_seen(built) as seen:
                data = scored(built, data)
            key = f"{name}_checkpointed" if checkpointing else name
            update(built, data)
            found[key] = [row.tolist() for row in data["old_log_probs"].unbind()]
            found[f"{key}_parameters"] = parameters(built)
            found[f"{key}_metrics"] = built.engine.mismatch_metrics()
            # Padded to 14 tokens: what each sample's tokens were sent to, and what was asked for.
            width = max(a + b for a, b in zip(PROMPTS, RESPONSES, strict=True))
            handed = seen[0].view(4, width, -1)
            lengths = [a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)]
            found[f"{key}_seen"] = [handed[i, : n - 1].tolist() for i, n in enumerate(lengths)]
            found[f"{key}_asked"] = [row[:-1, 0].tolist() for row in given.unbind()]
            found[f"{key}_last"] = [handed[i, n - 1].tolist() for i, n in enumerate(lengths)]
    asked = tu.assign_non_tensor(batch(rollout=other(routes)), mismatch_native=True)
    found["asked_native"] = logprobs(built, asked) == logprobs(
        built, tu.assign_non_tensor(batch(), mismatch_native=True)
    )
    found["report"] = worker(model, {"routing": R3}).engine.mismatch_report()
    return found


def changed(data: TensorDict) -> TensorDict:
    """Return a batch with another first token in the second sample's `input_ids`, all else as it was."""
    rows = [row.clone() for row in data["input_ids"].unbind()]
    rows[1][0] = (rows[1][0] + 1) % 16
    data = data.clone()
    data["input_ids"] = nested(rows)
    return data


def other_tokens(model: str) -> dict[str, Any]:
    """Score altered samples beside the batch, in calls of verl's worker and in a step that runs the model once more."""
    found: dict[str, Any] = {}
    routes = other(own_routes(model))
    native = worker(model, vendor=None)
    found["native"], found["native_altered"] = logprobs(native, batch()), logprobs(native, changed(batch()))
    for mode in ("R3", "R2"):
        for packed in (False, True):
            built = worker(model, {"routing": {"mode": mode, "measured": 1.0}}, use_remove_padding=packed)
            data = scored(built, batch(rollout=routes) if mode == "R3" else batch())
            own: dict[str, Any] = {"scored": [row.tolist() for row in data["old_log_probs"].unbind()]}
            own["altered"] = logprobs(built, changed(data))
            own["refused"] = refused(update, built, changed(data))
            own["others"] = built.engine.mismatch_metrics()["routing/other_passes"]
            prepare = type(built.engine).prepare_model_outputs

            def twice(engine: Any, *args: Any, prepare: Any = prepare, built: Any = built, **kwargs: Any) -> Any:
                # As an own engine's step may: the same number of tokens, of which one is another.
                ids = built.seen["input_ids"].clone()
                ids.view(-1)[0] = (ids.view(-1)[0] + 1) % 16
                built.extra.append(engine.module(**{**built.seen, "input_ids": ids}, use_cache=False).logits.detach())
                return prepare(engine, *args, **kwargs)

            def seen(module: Any, args: Any, given: Any, built: Any = built) -> None:
                built.seen = {
                    name: given[name] for name in ("input_ids", "attention_mask", "position_ids") if name in given
                }

            built.extra = []
            handle = built.engine.module.register_forward_pre_hook(seen, with_kwargs=True)
            built.engine.prepare_model_outputs = twice.__get__(built.engine)
            again = scored(built, data.exclude("old_log_probs"))
            handle.remove()
            own["again"] = [row.tolist() for row in again["old_log_probs"].unbind()]
            with torch.no_grad():
                ids = built.seen["input_ids"]
                plain = built.engine.module(**{**built.seen, "input_ids": ids}, use_cache=False).logits
            own["extra"] = float((built.extra[-1] - plain).abs().max())
            own["extra_others"] = built.engine.mismatch_metrics()["routing/other_passes"]
            found[f"{mode} {packed}"] = own
    return found


def layouts(model: str) -> dict[str, Any]:
    """Replay other routes in micro-batches of several shapes: whole, one by one, dynamic, packed, packed and filled up."""
    routes = other(own_routes(model, range(8)))
    found: dict[str, Any] = {}
    for name, options in {
        "whole": {"micro_batch": 4},
        "one_by_one": {"micro_batch": 1},
        "dynamic": {"tokens": 24},
        "packed": {"micro_batch": 4, "use_remove_padding": True},
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
        asked = Counter(tuple(row[0].tolist()) for sample in routes.unbind() for row in sample[:-1])
        metrics = update(built, data, mini_batch=4, epochs=2, shuffle=True)
        found[name] = {
            "logprobs": [row.tolist() for row in data["old_log_probs"].unbind()],
            "grad_norm": [float(value) for value in metrics["grad_norm"]],
            "missing": missing(asked, seen),
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

    found = {
        "zero": tried(2, torch.zeros_like),
        "empty": tried(1, lambda row: row[:0]),
        "short": tried(0, lambda row: row[:-3]),
        "zeros_from": tried(0, lambda row: put(row, slice(9, None), 0)),
        "surplus": tried(3, lambda row: torch.cat([row, row[:1]])),
        "hole": tried(1, lambda row: put(row, 3, 0)),
        "range": tried(1, lambda row: put(row, (2, 1, 0), 16)),
        "layer": tried(3, lambda row: put(row, (slice(None), 1), 0)),
        "gone": refused(update, built, scored_natively(batch())),
    }
    # Layers swapped in all samples: only the model can tell, before it has had routes that are its own.
    swapped = nested([row.flip(1) for row in routes])
    found["swapped"] = refused(built.infer_batch, batch(rollout=swapped))
    # A pass that is asked to judges the samples, and altered routes have not seen it.
    built.infer_batch(tu.assign_non_tensor(batch(rollout=nested(list(routes))), **{JUDGED: True}))
    found["range_judged"] = tried(1, lambda row: put(row, (2, 1, 0), 16))
    found["first_judged"] = tried(1, lambda row: put(row, (0, 1, 0), 16))
    found["short_judged"] = tried(0, lambda row: row[:-3])
    found["untouched"] = before == parameters(built)
    # What has no loss needs no routes: samples that fill up a batch, and what an agent loop adds at the end.
    masks = [torch.ones(n, dtype=torch.long) for n in RESPONSES]
    masks[2][:] = 0
    filled = {"loss_mask": nested(masks), "response_mask": nested(masks)}
    found["filler"] = tried(2, torch.zeros_like, **filled)
    masks = [torch.ones(n, dtype=torch.long) for n in RESPONSES]
    masks[0][4:] = 0
    ends = {"loss_mask": nested(masks), "response_mask": nested(masks)}
    found["tool_answer"] = tried(0, lambda row: put(row, slice(9, None), 0), **ends)
    found["tool_answer_short"] = tried(0, lambda row: put(row, slice(8, None), 0), **ends)
    found |= moved(built, nested(routes), uids)
    # From here on the engine has sent weights, of version 3.
    built.engine.replay.weight_version = 3
    found["of_nobody"] = tried(0, torch.clone)
    for name, spans in (
        ("of_present", [(3, 3)] * 4),
        ("of_older", [(3, 3), (2, 2), (3, 3), (3, 3)]),
        ("of_two", [(3, 3), (3, 3), (2, 3), (3, 3)]),
        ("of_one_unknown", [(3, 3), (3, 3), (3, 3), (None, None)]),
    ):
        stamps = [{"min_global_steps": first, "max_global_steps": last} for first, last in spans]
        found[name] = tried(0, torch.clone, extra_fields=NonTensorStack(*stamps))
    return found


def judged(model: str) -> dict[str, Any]:
    """Score a batch of which one sample has other tokens and one has an id out of range, and update it without the two."""
    routes = other(own_routes(model))
    good = batch(rollout=routes)
    data = changed(good)
    given = [row.clone() for row in data["routed_experts"].unbind()]
    given[2][2, 1, 0] = 16
    data["routed_experts"] = nested(given)
    found: dict[str, Any] = {}
    for name, options in {
        "whole": {},
        "packed": {"use_remove_padding": True},
        "one by one": {"micro_batch": 1},
    }.items():
        built = worker(model, {"routing": R3}, **options)
        expected = logprobs(built, good)
        asked = tu.assign_non_tensor(data.clone(), **{JUDGED: True})
        output = built.infer_batch(asked)
        # A measured batch is scored once more, without replay.
        native = refused(built.infer_batch, tu.assign_non_tensor(good.clone(), mismatch_native=True))
        scores = response_from_nested(output["log_probs"], data["response_mask"]).unbind()
        own: dict[str, Any] = {
            "native": native,
            "faults": [sorted(set(row.tolist())) for row in output[FAULT].unbind()],
            # Experts multiply the tokens of all samples together, so that rounding depends on the others' routes.
            "apart": [
                float((row - torch.tensor(wanted)).abs().max()) for row, wanted in zip(scores, expected, strict=True)
            ],
            "plain": FAULT in built.infer_batch(tu.assign_non_tensor(good.clone(), **{JUDGED: True})).keys(),
        }
        marked = data.clone()
        marked[BAD] = marks([False, True, True, False])
        marked["old_log_probs"] = nested([row.float() for row in scores])
        own["unmarked"] = refused(update, built, marked.exclude(BAD))
        # In the update the driver has masked the rows; verl's loss here is of all tokens, so only the replay is looked at.
        own["marked"] = refused(update, built, marked)
        found[name] = own
    built = worker(model, {"routing": R3})
    whole = batch(rollout=nested([torch.zeros_like(row) for row in routes.unbind()]))
    found["all"] = refused(built.infer_batch, tu.assign_non_tensor(whole, **{JUDGED: True}))
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


def unhooked(model: str) -> dict[str, Any]:
    """Score and update with an engine of verl's that runs its micro-batches without our `forward_step`."""
    routes, found = other(own_routes(model)), {}
    for mode in ("R3", "R2"):
        built = worker(model, {"routing": {"mode": mode, "measured": 1.0}})
        data = scored(built, batch(rollout=routes) if mode == "R3" else batch())
        before = parameters(built)
        built.engine.forward_step = partial(FSDPEngineWithLMHead.forward_step, built.engine)
        found[mode] = {
            "scored": refused(built.infer_batch, data.exclude("routed_experts") if mode == "R2" else data.clone()),
            "updated": refused(update, built, data),
            "kept": before == parameters(built),
        }
        del built.engine.forward_step
        found[mode]["after"] = refused(update, built, data)
    return found


def filled_up(model: str) -> dict[str, Any]:
    """Replay samples beside a row with which verl fills up a batch, on a model with one expert for a token."""
    found = {}
    one: dict[str, Any] = {"override_config": {"attn_implementation": "sdpa", "num_experts_per_tok": 1}}
    own = scored(worker(model, {"routing": R2}, micro_batch=2, **one), batch((0, 1)))["routed_experts"]
    for mode, packed in itertools.product(("R2", "R3"), (False, True)):
        block = {"routing": {"mode": mode, "measured": 1.0}}
        built = worker(model, block, micro_batch=3, use_remove_padding=packed, **one)
        data = padded_by_verl(batch((0, 1)))
        filler = torch.full((128, 2, 1), 1 if mode == "R2" else 0)
        routes = [*(as_rollout(own) if mode == "R3" else own).to(torch.int16).unbind(), filler.to(torch.int16)]
        data["routed_experts"] = nested(routes)
        if mode == "R3":
            data["routed_experts"] = carrying(data["routed_experts"], data["input_ids"])
            # As verl fills a batch up, with zeros alone.
            data["routed_experts"] = nested(
                [*data["routed_experts"].unbind()[:2], torch.zeros(128, 6, 1, dtype=torch.int16)]
            )
        with experts_seen(built) as seen:
            update(built, data)
        last = 0 if mode == "R2" else 1
        asked = Counter((int(row[0, 0]),) for sample in routes[:2] for row in sample[: len(sample) - last])
        found[f"{mode} {packed}"] = {**built.engine.mismatch_metrics(), "missing": missing(asked, seen)}
    return found


class Store:
    """Samples by key, instead of verl's TransferQueue."""

    def __init__(self, data: TensorDict) -> None:
        names = [name for name in data.keys() if isinstance(data[name], Tensor)]
        self.samples = {f"{row}": {name: data[name].unbind()[row] for name in names} for row in range(len(data))}

    def kv_batch_get(self, keys: list[str], partition_id: str | None) -> list[dict[str, Tensor]]:
        return [self.samples[key] for key in keys]

    def kv_batch_put(
        self, keys: list[str], partition_id: str | None, fields: TensorDict, tags: list[dict[str, Any]]
    ) -> None:
        for row, key in enumerate(keys):
            self.samples[key] = {name: fields[name].unbind()[row] for name in self.samples["0"]}


def balanced(model: str) -> dict[str, Any]:
    """Let verl fill up seven samples and balance them over two ranks, and compare what each rank's experts are handed."""
    routes = nested(other(own_routes(model, range(8))).unbind()[:7])
    plain = batch(range(7), rollout=routes)
    store = Store(plain)
    tags = [{"seq_len": len(ids)} for ids in plain["input_ids"].unbind()]
    trainer = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0, 1]}),
        _get_required_batch_multiple=lambda ranks: ranks,
        tokenizer=SimpleNamespace(eos_token_id=2),
    )
    with mock.patch.object(padding_utils, "tq", store):
        meta = PPOTrainer._balance_batch(trainer, KVBatchMeta(keys=list(store.samples), tags=tags), {})
    found: dict[str, Any] = {"keys": meta.keys, "filled_up": [tag.get("is_padding", False) for tag in meta.tags]}
    found["wrong"], found["compared"], found["updated"] = 0, 0, []
    for keys in (meta.keys[:4], meta.keys[4:]):  # as verl's dispatch cuts a batch
        rows = [{**store.samples[key], "advantages": torch.ones(len(store.samples[key]["responses"]))} for key in keys]
        data = TensorDict({name: nested([row[name] for row in rows]) for name in rows[0]}, batch_size=4)
        lengths = [len(row["input_ids"]) for row in rows]
        tu.assign_non_tensor(
            data, temperature=1.0, calculate_entropy=True, global_token_num=lengths, compute_loss=False
        )
        built = worker(model, {"routing": R3}, use_remove_padding=True)
        with experts_seen(built) as seen:
            data = scored(built, data)
            update(built, data)
        for key, *passes in zip(keys, *(ids.split(lengths) for ids in seen), strict=True):
            if key.isdigit():  # verl's own sample has no routes
                wanted = routes.unbind()[int(key)][:-1, 0]
                for ids in passes:
                    found["wrong"] += int((ids[:-1] != wanted).any(1).sum())
                    found["compared"] += len(wanted)
        found["updated"].append(built.engine.mismatch_metrics())
    return found


def padded_by_verl(data: TensorDict) -> TensorDict:
    """Return a batch with a third sample of 128 tokens without a loss, as verl fills batches up."""
    rows = {name: list(data[name].unbind()) for name in data.keys() if isinstance(data[name], Tensor)}
    ids = torch.ones(128, dtype=torch.long)
    filler = {"prompts": ids[:64], "responses": ids[64:], "input_ids": ids, "position_ids": torch.arange(128)}
    for name, values in rows.items():
        values.append(filler[name] if name in filler else torch.zeros(64, dtype=values[0].dtype))
    filled = TensorDict({name: nested(values) for name, values in rows.items()}, batch_size=3)
    filled["old_log_probs"] = nested([torch.zeros(len(row)) for row in rows["responses"]])
    tu.assign_non_tensor(filled, temperature=1.0, calculate_entropy=True, global_token_num=[14, 12, 128])
    return filled


def scored_natively(data: TensorDict) -> TensorDict:
    """Return a batch with old log-probabilities of 0 and no routes."""
    data["old_log_probs"] = nested([torch.zeros(n) for n in RESPONSES])
    return data


def reference(model: str) -> dict[str, Any]:
    """Score with a reference engine, which replays only where it was asked to."""
    routes = other(own_routes(model))
    found: dict[str, Any] = {"native": logprobs(worker(model, vendor=None), batch())}
    for name, block in (("off", R3), ("on", {**R3, "reference": True})):
        built = worker(model, {"routing": block}, engine={"forward_only": True})
        found[name] = logprobs(built, batch(rollout=routes))
        found[f"{name}_metrics"] = built.engine.mismatch_metrics()
    found["actor"] = logprobs(worker(model, {"routing": R3}), batch(rollout=routes))
    return found


def adapter(model: str) -> dict[str, Any]:
    """Score with an adapter, whose base is the reference: verl switches the adapter off for that pass."""
    complete = other(scored(worker(model, {"routing": R2}), batch())["routed_experts"])
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    found: dict[str, Any] = {}
    for mode in ("R2", "R3"):
        for wanted in (False, True):
            built = worker(model, {"routing": {"mode": mode, "reference": wanted}}, **lora)
            data = batch(routed_experts=complete) if mode == "R2" else batch(rollout=as_rollout(complete))
            base = built.infer_batch(tu.assign_non_tensor(data.clone(), no_lora_adapter=True))
            found[f"{mode}_base_{wanted}"] = [
                row.tolist() for row in response_from_nested(base["log_probs"], data["response_mask"]).unbind()
            ]
            found[f"{mode}_recorded_base_{wanted}"] = "routed_experts" in base.keys()
            found[f"{mode}_{wanted}"] = logprobs(built, data)
    found["sent"] = refused(lambda: len(built.engine.get_per_tensor_param(base_sync_done=True)[0]))
    update(built, scored(built, data))
    found["trained"] = logprobs(built, data)
    return found


def write_routes(model: str, path: str) -> str:
    """Write routes of eight samples, which are not the model's own, for ranks to share."""
    torch.save(list(other(own_routes(model, range(8))).unbind()), path)
    return path


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


def sharded(model: str, routes: str, path: str) -> dict[str, Any]:
    """Score and update eight samples that the ranks share, with R3 and with R2; gradients go to a file."""
    found: dict[str, Any] = {}
    given = torch.load(routes)
    gradients: dict[str, Tensor] = {}
    for mode in ("R3", "R2"):
        # FSDP1 says whose gradient is where only with the original parameters.
        built = worker(
            model, {"routing": {"mode": mode, "measured": 1.0}}, engine={"use_orig_params": strategy() == "fsdp"}
        )
        mine, rows = share(given)
        data = batch(mine, rollout=nested(rows)) if mode == "R3" else batch(mine)
        data = scored(built, data)
        found[mode] = sum(everywhere([row.tolist() for row in data["old_log_probs"].unbind()]), [])
        found[f"{mode}_routes"] = sum(everywhere([row.tolist() for row in data["routed_experts"].unbind()]), [])

        def keep(optimizer: Any, *_: Any, built: Any = built, mode: str = mode) -> None:
            gradients.update({f"{mode}.{name}": found for name, found in gathered_gradients(built.engine.module)})

        built.engine.optimizer.register_step_pre_hook(keep)
        found[f"{mode}_grad_norm"] = float(update(built, data)["grad_norm"][0])
        found[f"{mode}_metrics"] = built.engine.mismatch_metrics()
    if torch.distributed.get_rank() == 0:
        torch.save(gradients, path)
    return found


def gathered_gradients(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole gradient of each weight, which ranks may share."""
    if strategy() != "fsdp":
        for name, parameter in module.named_parameters():
            yield name, whole(parameter.grad).clone()
        return
    with FullyShardedDataParallel.summon_full_params(module, writeback=False, with_grads=True):
        for name, parameter in module.named_parameters():
            yield name, parameter.grad.detach().clone()


def shards(model: str, checkpoint: dict[str, str]) -> dict[str, Any]:
    """Put every rank's shards of the weights together again, and scan them with one value too large on each."""
    found: dict[str, Any] = {}
    for orig in (False, True) if strategy() == "fsdp" else (False,):
        built = worker(model, {}, engine={"use_orig_params": orig})
        module = built.engine.module
        parts: dict[str, list[Tensor]] = {}
        for own in everywhere([(name, part.flatten().tolist()) for name, part in named_shards(module)]):
            for name, values in own:
                parts.setdefault(name, []).append(torch.tensor(values))
        together = {name: digest(torch.cat(rows)) for name, rows in parts.items()}
        pieces = dict(named_pieces(module))
        sums = added(everywhere({name: sums_of(piece, torch.float16) for name, piece in pieces.items()}))
        whole = load_file(Path(model) / "model.safetensors")
        shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        held = {
            name: sums_of(Piece(values=tensor.reshape(-1), start=0, shape=shapes[name]), torch.float16)
            for name, tensor in whole.items()
        }
        compared = compare_sums(held, sums, {}, shapes)
        *_, (name, part) = named_shards(module)
        with torch.no_grad():
            part.view(-1)[-1] = 1e6
        report = ReadinessReport(weights=scan_weights(named_shards(module), "float16"), activations=[], dtype="float16")
        found[str(orig)] = {
            "whole": together == checkpoint,
            "names": sorted(together),
            "compared": sorted(one.name for one in compared if one.equal),
            "unequal": sorted(one.name for one in compared if not one.equal),
            "reasons": everywhere([name, *report.reasons]),
        }
    return found


def digest(values: Tensor) -> str:
    """Return a digest of numbers, to the last bit."""
    return hashlib.sha256(values.flatten().float().numpy().tobytes()).hexdigest()


def shards_on(world: int, model: str) -> dict[str, Any]:
    """Run `shards` on so many ranks, and return what rank 0 found."""
    checkpoint = {name: digest(value) for name, value in load_file(Path(model) / "model.safetensors").items()}
    return on_ranks(shards, world, model=model, checkpoint=checkpoint)[0]


def rank_faults(moe: str, dense: str, routes: str) -> dict[str, Any]:
    """Lose a sample's routes on the last rank, then let a gradient overflow there alone."""
    built = worker(moe, {"routing": R3})
    mine, rows = share(torch.load(routes))
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    if last:
        rows[1] = torch.zeros_like(rows[1])
    found: dict[str, Any] = {"lost": everywhere(refused(built.infer_batch, batch(mine, rollout=nested(rows))))}
    built = worker(dense, {"precision": {"dtype": "float16", "init_scale": 1024.0}}, dtype="float16")
    data = scored(built, batch(mine))
    update(built, data)
    before, scale = parameters(built), built.engine.scaler.get_scale()
    with overflowing(built.engine, last):
        update(built, data)
    metrics = built.engine.mismatch_metrics()
    found["kept"] = before == parameters(built)
    found["scales"] = everywhere([scale, built.engine.scaler.get_scale()])
    found["epochs"] = everywhere(built.engine.lr_scheduler.last_epoch)
    found["metrics"] = everywhere(metrics)
    return found


def sharded_on(world: int, **payload: Any) -> dict[str, Any]:
    """Run `sharded` on so many ranks, and return what rank 0 found."""
    return on_ranks(sharded, world, **payload)[0]


def rank_faults_on_two(**payload: Any) -> dict[str, Any]:
    """Run `rank_faults` on two ranks, and return what rank 0 found."""
    return on_ranks(rank_faults, 2, **payload)[0]
