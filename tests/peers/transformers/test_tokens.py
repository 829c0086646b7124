"""Which passes are replayed: those over the tokens that routes were recorded of, and no others, however they are laid out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from torch import Tensor

from mismatch_ext.errors import ReplayError
from mismatch_ext.routing import align, align_packed
from tests.oracles.routing.passes import another, backward, equal, forward, run
from tests.peers.transformers.cases import FAMILIES, QWEN, case

CASES = 240
LAYOUTS = ("left", "right", "right without mask", "packed")


@dataclass
class Laid:
    """A pass over some sequences.

    Args:
        inputs: What the model is called with.
        places: Row and first column of each sequence.
        mask: Where there are tokens `[B, S]`.
    """

    inputs: dict[str, Any]
    places: list[tuple[int, int]]
    mask: Tensor


def lay(sequences: list[Tensor], layout: str, wider: int) -> Laid:
    """Lay sequences out as trainers do, with some columns of padding more."""
    lengths = [len(ids) for ids in sequences]
    if layout == "packed":
        places = [(0, sum(lengths[:index])) for index in range(len(lengths))]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ids = torch.cat(sequences)[None]
        return Laid({"input_ids": ids, "position_ids": positions}, places, torch.ones_like(ids))
    width = max(lengths) + wider
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    places = [(row, width - length if layout == "left" else 0) for row, length in enumerate(lengths)]
    for (row, first), own in zip(places, sequences, strict=True):
        ids[row, first : first + len(own)], mask[row, first : first + len(own)] = own, 1
    return Laid({"input_ids": ids} | ({} if "without" in layout else {"attention_mask": mask}), places, mask)


def change(laid: Laid, random: Random) -> str:
    """Change a pass in some way, or not at all, and say how."""
    inputs, (rows, width) = laid.inputs, laid.mask.shape
    how = random.choice(["nothing"] * 4 + ["token", "prompt", "order", "some", "column", "mask", "no mask", "jump"])
    ids = inputs["input_ids"] = inputs["input_ids"].clone()
    mask = inputs["attention_mask"] = inputs["attention_mask"].clone() if "attention_mask" in inputs else None
    row, column = random.randrange(rows), random.randrange(width)
    if how == "token":
        ids[row, column] = (ids[row, column] + 1) % 96
    elif how == "prompt":
        ids[:, : width // 2] = 9
    elif how in ("order", "some"):
        order = torch.randperm(rows) if how == "order" else torch.arange(rows)[: max(rows - 1, 1)]
        for name, value in inputs.items():
            inputs[name] = None if value is None else value[order] if len(value) == rows else value
    elif how == "column":
        for name, value in inputs.items():
            inputs[name] = None if value is None else torch.nn.functional.pad(value, (1, 0))
    elif how == "mask" and mask is not None:
        mask[row, column] = 1 - mask[row, column]
    elif how == "no mask":
        inputs["attention_mask"] = None
    elif how == "jump":
        inputs["position_ids"] = torch.arange(width)[None].repeat(rows, 1)
        inputs["position_ids"][:, column:] += 3
    return how


def logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each token but the first."""
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


@pytest.mark.numeric
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_pass_is_replayed_over_its_own_tokens_alone(checkpointed: bool) -> None:
    model = FAMILIES[QWEN].build()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    random, seen = Random(checkpointed), Counter[tuple[str, bool]]()
    torch.manual_seed(checkpointed)
    for number in range(CASES // 2):
        sequences = [torch.randint(3, 96, (random.randint(4, 9),)) for _ in range(random.randint(1, 4))]
        if random.random() < 0.2:
            sequences[-1] = sequences[0].clone()  # of equal tokens, but not of equal routes
        traces, expected = [], []
        for index, ids in enumerate(sequences):
            with torch.no_grad(), record_routing(model) as recording:
                model(input_ids=ids[None], use_cache=False)
            trace = another(another(recording.trace)) if index % 2 else another(recording.trace)
            traces.append(trace.slice(0, len(ids) - (number % 2)))  # as an engine's: none for the last token
            with torch.no_grad(), replay_routing(model, trace):
                expected.append(logprobs(model(input_ids=ids[None], use_cache=False).logits[0], ids))
        layout, wider = random.choice(LAYOUTS), random.randrange(3)
        laid = lay(sequences, layout, wider)
        lengths = [len(ids) for ids in sequences]
        trace, recorded = align_packed(traces, lengths) if layout == "packed" else align(traces, laid.mask)
        other = (
            lay(sequences, layout, wider)
            if random.random() < 0.7
            else lay(sequences, random.choice(LAYOUTS), random.randrange(3))
        )
        how = change(other, random)
        plain = model(**other.inputs, use_cache=False).logits
        plain_gradients = backward(model, plain.sum())
        with replay_routing(model, trace, recorded, others="native") as replay:
            first = model(**laid.inputs, use_cache=False).logits.detach()
            logits = model(**other.inputs, use_cache=False).logits
            gradients = backward(model, logits.sum())
        taken = replay.forwards == 2
        assert replay.forwards + replay.others == 2, (number, how)
        seen[how, taken] += 1
        for result in (first, logits.detach()) if taken else (first,):
            for (row, column), ids, wanted in zip(laid.places, sequences, expected, strict=True):
                torch.testing.assert_close(
                    logprobs(result[row, column : column + len(ids)], ids),
                    wanted,
                    rtol=0,
                    atol=1e-5,
                    msg=f"{number}: {how}",
                )
        if not taken:
            assert torch.equal(logits, plain) and equal(gradients, plain_gradients), (number, how)
    taken, native = (sum(count for (_, was), count in seen.items() if was == kind) for kind in (True, False))
    assert taken > 25 and native > 40, seen
    assert not seen["prompt", True] and seen["nothing", True] > 15, seen


def test_the_first_row_that_differs_is_named() -> None:
    model, own, _ = case(QWEN)
    assert own.tokens is not None
    tokens = own.tokens.clone()
    tokens[3] += 1
    changed = replace(own, tokens=tokens)
    message = (
        f"1 of 24 rows differ, the first is row 3, token {own.tokens[3]} in the pass and token {tokens[3]} in the trace"
    )
    with pytest.raises(ReplayError, match=message), replay_routing(model, changed):
        forward(model)
    with pytest.raises(ReplayError, match="none of the 1 forward passes is the one"):
        with replay_routing(model, changed, others="native"):
            forward(model)


def test_inputs_that_are_no_tokens_are_proven_by_nobody() -> None:
    model, own, plain = case(QWEN)
    ids = torch.arange(3, 15)[None].repeat(2, 1)
    for inputs, message in (
        ({"inputs_embeds": model.get_input_embeddings()(ids)}, "no input_ids"),
        ({"input_ids": ids, "attention_mask": torch.zeros(2, 1, 12, 12)}, r"attention_mask is not \[B, S\]"),
        ({"input_ids": ids.view(1, -1), "position_ids": torch.arange(12).repeat(2)[None]}, "pass use_cache=False"),
        ({"input_ids": ids, "past_key_values": model(input_ids=ids[:, :3]).past_key_values}, "KV cache of 3 tokens"),
    ):
        with pytest.raises(ReplayError, match=message), torch.no_grad(), replay_routing(model, own):
            model(**inputs)
    with replay_routing(model, own, others="replay"):
        assert run(model).same(plain)
