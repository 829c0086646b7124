"""Sampling masks through verl's FSDP engine, held to a dense mask over the logits of verl's own; and masks that are wrong."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from mismatch_ext.adapters.verl.bad_rows import BAD, FAULT, JUDGED, marks
from mismatch_ext.adapters.verl.sampling_mask import IDS, SIZES, EngineMasks, fields_of, read
from mismatch_ext.patches.vllm.top_logprobs import SampledLogprobs
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from mismatch_ext.sampling_mask import TokenSupport
from tests.peers.forks import on_ranks
from tests.peers.verl.in_process import scenarios_ulysses as ulysses
from tests.peers.verl.in_process.routes import nested, refused
from tests.peers.verl.in_process.workers import batch, logprobs, parameters, scored, update, worker

MASKED: dict[str, Any] = {"sampling_mask": {}}
LEFT = 5  # tokens of a mask


def supports(data: TensorDict, vocabulary: int) -> list[TokenSupport]:
    """Return masks of the samples' responses: the sampled token and others, drawn by its place."""
    found = []
    for number, response in enumerate(data["responses"].unbind()):
        rows = []
        for place, token in enumerate(response.tolist()):
            drawn = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(31 * number + place))
            rows.append([token, *[one for one in drawn.tolist() if one != token][: LEFT - 1]])
        found.append(TokenSupport.from_lists(rows, vocabulary))
    return found


def with_fields(data: TensorDict, masks: list[TokenSupport]) -> TensorDict:
    """Return a batch with the fields that agent loops put there."""
    fields = [fields_of(one) for one in masks]
    data = data.clone()
    for name in (IDS, SIZES):
        data[name] = nested([one[name] for one in fields])
    return data


class Dense:
    """Computes what verl does, over a mask of the whole vocabulary, and 0 where nothing was sampled."""

    def __init__(self, data: TensorDict, masks: list[TokenSupport], vocabulary: int) -> None:
        self._rows = {}
        for ids, response, one in zip(data["input_ids"].unbind(), data["responses"].unbind(), masks, strict=True):
            left = torch.zeros(len(ids), vocabulary, dtype=torch.bool)
            for place in range(len(response)):
                left[len(ids) - len(response) - 1 + place, one.slice(place, place + 1).ids.long()] = True
            self._rows[tuple(ids.tolist())] = left
        self._data = data

    def __call__(self, logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        """Return the log-probabilities of the whole batch, which is scored in one pass."""
        left = torch.cat([self._rows[tuple(ids.tolist())] for ids in self._data["input_ids"].unbind()])
        assert len(left) == len(logits)
        any_left = left.any(-1)
        safe = left | ~any_left[:, None]
        found = logits.masked_fill(~safe, -torch.inf).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        return torch.where(any_left, found, 0.0)


def masked(model: str) -> dict[str, Any]:
    """Score and update with masks, and by verl's own engine with a dense mask; then with masks that are wrong."""
    found: dict[str, Any] = {}
    built = worker(model, MASKED)
    vocabulary = int(built.engine.model_config.hf_config.vocab_size)
    plain = batch()
    masks = supports(plain, vocabulary)
    data = with_fields(plain, masks)
    found["native"] = logprobs(worker(model), plain)
    found["scored"], found["report"] = logprobs(built, data), built.engine.mismatch_report()["sampling_mask"]
    # Two samples in a pass, and in another order.
    small = worker(model, MASKED, tokens=32)
    found["small"] = logprobs(small, data)
    update(built, scored(built, data))
    found["metrics"] = built.engine.mismatch_metrics()
    after = worker(model, vendor=None)
    with mock.patch.object(transformer_impl, "logprobs_from_logits", Dense(plain, masks, vocabulary)):
        found["dense"] = logprobs(after, plain)
        update(after, scored(after, plain))
    found["moved"] = [logprobs(one, plain) for one in (after, worker(model))]
    found["updated"] = logprobs(_unmasked(built, model), plain)
    found["wrong"] = _wrong(model, data, masks, vocabulary)
    return found


def judged(model: str) -> dict[str, Any]:
    """Score a batch of which two samples have each other's masks, and say what the pass returns of them."""
    built = worker(model, MASKED)
    vocabulary = int(built.engine.model_config.hf_config.vocab_size)
    plain = batch()
    masks = supports(plain, vocabulary)
    data = with_fields(plain, masks)
    moved = with_fields(data, [masks[1], masks[0], *masks[2:]])
    output = built.infer_batch(tu.assign_non_tensor(moved.clone(), **{JUDGED: True}))
    marked = moved.clone()
    marked[BAD] = marks([True, True, False, False])
    return {
        "faults": [sorted(set(row.tolist())) for row in output[FAULT].unbind()],
        "clean": FAULT in built.infer_batch(tu.assign_non_tensor(data.clone(), **{JUDGED: True})).keys(),
        "marked": logprobs(built, marked)[2:] == logprobs(built, data)[2:],
        "unmarked": refused(built.infer_batch, moved),
    }


class Collectives:
    """torch.distributed of two ranks that do the same, which notes what they share."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return 2

    def get_rank(self) -> int:
        return 0

    def get_backend(self) -> str:
        return "gloo"

    def all_reduce(self, values: Tensor) -> None:
        self.used.append("all_reduce")
        values *= 2

    def all_gather_object(self, values: list[Any], value: Any) -> None:
        self.used.append("all_gather_object")
        values[:] = [value] * 2


def collectives() -> dict[str, Any]:
    """Return what ranks share for the masks of a pass that is judged, with and without bad samples."""
    plain = batch()
    supported = supports(plain, 16)
    found = {}
    for name, masks in (("clean", supported), ("bad", [supported[1], supported[0], *supported[2:]])):
        data = tu.assign_non_tensor(with_fields(plain, masks), **{JUDGED: True})
        engine_masks, ranks = EngineMasks(16), Collectives()
        with mock.patch("mismatch_ext.ranks.dist", ranks), engine_masks.batch(data, rank=0, forward_only=True):
            engine_masks._scored.update(range(len(data)))
        found[name] = {"used": ranks.used, "reports": engine_masks._reports}
    return found


def _unmasked(built: Any, model: str) -> Any:
    """Return a worker with the weights of another one, and without masks."""
    other = worker(model)
    other.engine.module.load_state_dict(built.engine.module.state_dict())
    assert parameters(other) == parameters(built)
    return other


def _wrong(model: str, data: TensorDict, masks: list[TokenSupport], vocabulary: int) -> dict[str, str]:
    """Return what is said of masks that are missing, moved, or of other tokens."""
    built = worker(model, MASKED)
    altered = data.clone()
    altered["input_ids"] = nested(
        [torch.cat([ids[:-1], (ids[-1:] + 1) % vocabulary]) for ids in data["input_ids"].unbind()]
    )
    unsampled = data.clone()
    unsampled["loss_mask"] = nested([torch.zeros_like(one) for one in data["loss_mask"].unbind()])
    kind, stock = type(built.engine), transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs
    with mock.patch.object(transformer_impl, "_scale_logits_by_temperature", lambda logits, *_, **__: 2 * logits):
        scaled = refused(built.infer_batch, data)
    with mock.patch.object(kind, "prepare_model_outputs", stock):
        overridden = refused(built.infer_batch, data)
    return {
        "other logits": scaled,
        "overridden": overridden,
        "missing": refused(built.infer_batch, data.exclude(IDS, SIZES)),
        "moved": refused(built.infer_batch, with_fields(data, [masks[1], masks[0], *masks[2:]])),
        "altered": refused(built.infer_batch, altered),
        # What verl fills a batch up with has no loss, and whatever masks.
        "filled up": refused(built.infer_batch, with_fields(unsampled, [masks[1], masks[0], *masks[2:]])),
    }


def read_off() -> dict[str, Any]:
    """Return the masks of an answer of two tokens, by how vLLM's log-probabilities of four come: kept numbers, and objects."""
    found: dict[str, Any] = {}
    ids = np.array([[2, 2, 5, 7], [9, 1, 9, 6]])  # the sampled token, then the most likely ones
    for cut in (True, False):
        values = np.array([[-0.1, -0.1, -2.0, -np.inf if cut else -3.0], [-1.0, -0.5, -1.0, -np.inf if cut else -3.0]])
        kept = SampledLogprobs()
        kept.left.take(ids, values)
        objects = [
            {int(token): SimpleNamespace(logprob=float(value)) for token, value in zip(*row, strict=True)}
            for row in zip(ids, values, strict=True)
        ]
        for name, reported in (("kept", kept), ("objects", objects), ("aborted", [])):
            support = read(SimpleNamespace(logprobs=reported), asked=3, vocabulary=20, name="r")
            known = isinstance(support, TokenSupport)
            found[f"{name} {cut}"] = [support.ids.tolist(), support.counts.tolist()] if known else support
    return found


def shared(model: str) -> list[list[float]]:
    """Score with masks on ranks that share each packed row."""
    ulysses.prepare()
    built = worker(
        model,
        MASKED,
        micro_batch=2,
        use_remove_padding=True,
        override_config={"attn_implementation": ulysses.ATTENTION},
        engine={"ulysses_sequence_parallel_size": int(os.environ["WORLD_SIZE"]), "use_orig_params": True},
    )
    plain = batch()
    vocabulary = int(built.engine.model_config.hf_config.vocab_size)
    return [
        row.tolist()
        for row in ulysses.scored(built, with_fields(plain, supports(plain, vocabulary)))["old_log_probs"].unbind()
    ]


def shared_on(world: int, **payload: Any) -> list[list[float]]:
    """Run `shared` on so many ranks, and return what rank 0 found."""
    found: list[list[float]] = on_ranks(shared, world, **payload)[0]
    return found
