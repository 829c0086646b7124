"""Forward passes of the doctor's model over a sample's responses, with the layout and the routes that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from mismatch_ext.adapters.transformers.doctor_layouts import Laid, laid
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from mismatch_ext.adapters.transformers.scoring import evaluating
from torch import Tensor, nn

from mismatch_ext.doctor import Sample
from mismatch_ext.routing import RoutingShape, RoutingTrace, align, align_packed

# Most elements of a batch's logits, 256 MiB in float32, and most rows of a batch, which are as many as the tests run with.
MOST_LOGITS, MOST_ROWS = 2**26, 64
Prompt = Callable[[tuple[int, ...]], tuple[int, ...]]


def passes(
    model: nn.Module,
    sample: Sample,
    routes: tuple[RoutingTrace, ...] | None,
    *,
    shape: RoutingShape | None,
    prompt: Prompt | None = None,
    taken: dict[int, RoutingTrace] | None = None,
    only: list[int] | None = None,
    layout: str = "right",
    most_rows: int = MOST_ROWS,
) -> Iterator[tuple[int, Tensor]]:
    """Yield each response's row and logits `[T, V]`; batches hold responses of similar length, and no KV cache is used.

    Args:
        model: The model.
        sample: The tokens.
        routes: The routes of each response; None lets the model route.
        shape: The shape of the model's routes; None for a model without experts.
        prompt: Changes each prompt.
        taken: Is filled, by response, with the model's own routes; only with padding on the right.
        only: The rows that are asked for; None for all.
        layout: A key of `LAYOUTS`.
        most_rows: Largest number of responses in a batch.
    """
    prompts = [prompt(ids) if prompt else ids for ids in sample.prompts]
    lengths = [len(ids) + len(response) for ids, response in zip(prompts, sample.responses, strict=True)]
    order = sorted(range(len(lengths)) if only is None else only, key=lengths.__getitem__)
    width = int(getattr(getattr(model, "config", None), "vocab_size", 0) or 2**17)
    device = next(model.parameters()).device
    while order:
        count = max(1, min(most_rows, MOST_LOGITS // (lengths[order[0]] * width)))
        batch, order = order[:count], order[count:]
        made = laid([prompts[row] for row in batch], [sample.responses[row] for row in batch], layout)
        with torch.no_grad(), evaluating(model), _routed(model, shape, batch, made, routes, taken):
            output = model(**_given(made, device), use_cache=False)
        for row, (place, start) in zip(batch, made.places, strict=True):
            yield row, output.logits[place, start - 1 : start - 1 + len(sample.responses[row])]


@contextmanager
def _routed(
    model: nn.Module,
    shape: RoutingShape | None,
    batch: list[int],
    made: Laid,
    routes: tuple[RoutingTrace, ...] | None,
    taken: dict[int, RoutingTrace] | None,
) -> Iterator[None]:
    if shape is None or (routes is None and taken is None):
        yield
        return
    mask = made.mask
    if routes is not None:
        traces = [routes[row] for row in batch]
        trace, known = align_packed(traces, made.lengths) if mask is None else align(traces, mask)
        with replay_routing(model, trace, known):
            yield
    else:
        with record_routing(model) as recording:
            yield
        assert taken is not None and mask is not None  # because padding is on the right
        whole, width = recording.trace, mask.shape[1]
        for place, row in enumerate(batch):
            taken[row] = whole.sequence(place * width, place * width + int(mask[place].sum()))


def _given(made: Laid, device: torch.device) -> dict[str, Tensor]:
    """Return a batch as arguments of a model; None is left out, as a trainer without that argument does."""
    given = {"input_ids": made.ids, "attention_mask": made.mask, "position_ids": made.positions}
    return {name: tensor.to(device) for name, tensor in given.items() if tensor is not None}
