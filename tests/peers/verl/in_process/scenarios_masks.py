"""Sampling masks through verl's FSDP engine, held to a dense mask over the logits of verl's own; and masks that are wrong."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from mismatch_ext.adapters.verl.bad_rows import BAD, FAULT, JUDGED, marks
from mismatch_ext.adapters.verl.sampling_mask import IDS, SIZES, fields_of, read
from mismatch_ext.patches.vllm.top_logprobs import SampledLogprobs
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl

from mismatch_ext.sampling_mask import TokenSupport
from tests.peers.forks import on_ranks
from tests.peers.verl.in_process import scenarios_ulysses as ulysses
from tests.peers.verl.in_process.routes import nested, refused
from tests.peers.verl.in_process.scenarios_replay import apart, mean_apart
from tests.peers.verl.in_process.workers import batch, logprobs, scored, update, worker

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


def prepared(model: str) -> tuple[Any, TensorDict, list[TokenSupport], int]:
    """Return a worker that replays masks, a batch, its masks, and the size of the vocabulary."""
    built = worker(model, MASKED)
    vocabulary = int(built.engine.model_config.hf_config.vocab_size)
    plain = batch()
    return built, plain, supports(plain, vocabulary), vocabulary


def masked(model: str) -> None:
    """Score and update with masks, and by verl's own engine with a dense mask over its logits."""
    built, plain, masks, vocabulary = prepared(model)
    data = with_fields(plain, masks)
    found = logprobs(built, data)
    native = worker(model)
    before = logprobs(native, plain)
    assert apart(found, before) > 0.5
    update(built, scored(built, data))
    assert built.engine.mismatch_metrics()["sampling_mask_size"] == LEFT
    verl = worker(model, vendor=None)
    with mock.patch.object(transformer_impl, "logprobs_from_logits", Dense(plain, masks, vocabulary)):
        assert apart(found, logprobs(verl, plain)) < 1e-5
        update(verl, scored(verl, plain))
    after = logprobs(verl, plain)
    native.engine.module.load_state_dict(built.engine.module.state_dict())
    assert mean_apart(logprobs(native, plain), after) < 0.01 * mean_apart(after, before)


def wrong(model: str) -> None:
    """Check what is said of masks that are missing, moved, or not under the pass, and that samples with other masks are bad."""
    built, plain, masks, _ = prepared(model)
    data, moved = (with_fields(plain, given) for given in (masks, [masks[1], masks[0], *masks[2:]]))
    said = refused(built.infer_batch, data.exclude(IDS, SIZES))
    assert "ReplayError: mismatch.sampling_mask, but the batch of 4 samples has no 'sampling_mask_ids'" in said
    assert refused(built.infer_batch, moved).startswith("RecordError: mismatch.sampling_mask: rollout 0")
    output = built.infer_batch(tu.assign_non_tensor(moved.clone(), **{JUDGED: True}))
    assert [sorted(set(row.tolist())) for row in output[FAULT].unbind()] == [[6], [6], [0], [0]]
    assert FAULT not in built.infer_batch(tu.assign_non_tensor(data.clone(), **{JUDGED: True})).keys()
    marked = moved.clone()
    marked[BAD] = marks([True, True, False, False])
    assert logprobs(built, marked)[2:] == logprobs(built, data)[2:]
    stock = transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs
    with mock.patch.object(type(built.engine), "prepare_model_outputs", stock):
        assert "scored 4 of 4 samples without its prepare_model_outputs" in refused(built.infer_batch, data)


def read_off() -> dict[str, Any]:
    """Return the masks of an answer of two tokens, by whether vLLM's log-probabilities of four show that some were cut off."""
    found: dict[str, Any] = {}
    ids = np.array([[2, 2, 5, 7], [9, 1, 9, 6]])  # the sampled token, then the most likely ones
    for cut in (True, False):
        values = np.array([[-0.1, -0.1, -2.0, -np.inf if cut else -3.0], [-1.0, -0.5, -1.0, -np.inf if cut else -3.0]])
        kept = SampledLogprobs()
        kept.left.take(ids, values)
        support = read(SimpleNamespace(logprobs=kept), asked=3, vocabulary=20, name="r")
        known = isinstance(support, TokenSupport)
        found[str(cut)] = [support.ids.tolist(), support.counts.tolist()] if known else support
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
    data = ulysses.scored(built, with_fields(plain, supports(plain, vocabulary)))
    return [row.tolist() for row in data["old_log_probs"].unbind()]


def alone(model: str) -> list[list[float]]:
    """Score with masks on one rank."""
    built, plain, masks, _ = prepared(model)
    return logprobs(built, with_fields(plain, masks))


def on_two_ranks(model: str) -> None:
    """Check that ranks that share a sequence have its masks."""
    (one,), (two, _) = on_ranks(alone, 1, model=model), on_ranks(shared, 2, model=model)
    assert apart(one, two) < 1e-5
