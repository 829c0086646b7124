"""Sums of the gap per sequence, for intervals: tokens of one response depend on each other, but whole responses do not.

`SequenceSums(trainer)` listens to what the trainer measures in evaluation. For each response it keeps the number of tokens, the
sums of |Δlogp| and of k3, and the number of tokens off by more than a factor of 2, with replay and (`native/`) without. If a
batch is scored without replay, its routes are recorded too: `flips` counts the (token, layer) pairs of a response for which the
trainer chose other experts than the engine. On request, each token is also scored in float64, which shows how far float32 itself
rounds (`rounding/`): a float32 engine and a float32 trainer may differ by that much.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers.routing import record_routing
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.replay import rows_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from examples.bootstrap import Interval, bootstrap_quotient, bootstrap_ratio
from mismatch_ext import RoutingTrace, kl_estimate

FILE = "sequences.json"
# Split -> name -> one value per response.
Sums = dict[str, dict[str, list[float]]]


class Float64(TorchDispatchMode):
    """Turns each float32 that a model asks for, in norms, rotary angles and routers, into float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, with float64 wherever float32 was asked for by name."""
        options = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **options)


@contextlib.contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[None]:
    """Compute a float32 model in float64 throughout; the weights come back as they were, bit for bit."""
    kinds = {value.dtype for value in (*model.parameters(), *model.buffers()) if value.is_floating_point()}
    if kinds != {torch.float32}:
        raise ValueError(
            f"only a float32 model can be computed in float64 and come back; this one holds {sorted(map(str, kinds))}"
        )
    experts = model.config._experts_implementation
    model.double()
    model.set_experts_implementation("eager")  # the grouped matrix product does not support float64
    try:
        with Float64():
            yield
    finally:
        model.float()
        model.set_experts_implementation(experts)


class SequenceSums:
    """Keeps the sums of every response that is evaluated.

    Args:
        trainer: A `MismatchGRPOTrainer`.
        float64: Whether to score each batch in float64 as well; the trainer must compute in float32.
    """

    def __init__(self, trainer: Any, *, float64: bool = False) -> None:
        self.sums: Sums = {}
        self._trainer, self._float64 = trainer, float64
        self._observe: Callable[..., None] = trainer.mm.log.observe
        self._generate: Callable[..., dict[str, Any]] = trainer._generate_and_score_completions
        self._score: Callable[..., Tensor] = trainer.mm.score_again
        self._scored: tuple[Tensor, Tensor] | None = None
        trainer.mm.log.observe = self._observed
        trainer._generate_and_score_completions = self._generated
        trainer.mm.score_again = self._scored_again

    def _observed(self, split: str, old: Tensor, rollout: Tensor, mask: Tensor, *, native: bool = False) -> None:
        self._observe(split, old, rollout, mask, native=native)
        if split == "train":
            return
        self._add(split, "native/" if native else "", old, rollout, mask)
        if not native:
            self._scored = (old, mask)

    def _generated(self, inputs: Any) -> dict[str, Any]:
        output = self._generate(inputs)
        if self._float64 and not self._trainer.model.training:
            assert self._scored is not None
            old, mask = self._scored
            self._add(self._trainer.mm.eval_split, "rounding/", old, self._exact(output), mask)
        return output

    def _scored_again(self, output: dict[str, Any]) -> Tensor:
        """Score a batch, and count the flips of each response when that is an evaluation's pass without replay."""
        trainer = self._trainer
        if trainer.model.training or trainer.mm.routing is not None or not output.get("routing"):
            return self._score(output)
        with record_routing(trainer.model) as recording:
            found = self._score(output)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        flips = [flips_of(*pair) for pair in zip(output["routing"], rows_of(recording.trace, mask), strict=True)]
        self.sums.setdefault(trainer.mm.eval_split, {}).setdefault("flips", []).extend(flips)
        return found

    def _exact(self, output: dict[str, Any]) -> Tensor:
        """Return log-probabilities of the batch `[B, T]` in float64, under the routes that it was scored with."""
        trainer, routing = self._trainer, self._trainer.mm.routing
        replayed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if routing is not None:
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            length = output["completion_ids"].size(1)
            replayed = routing.over_rows(trainer.model, mask, length, output["routing"], "reference")
        with in_float64(trainer.model), replayed, overridden(trainer.mm.scoring, routing=None):
            found = self._score(output)
        assert found.dtype == torch.float64
        return found

    def _add(self, split: str, prefix: str, ours: Tensor, theirs: Tensor, mask: Tensor) -> None:
        gap = torch.where(mask.bool(), ours.double() - theirs.double(), 0.0)
        kept = self.sums.setdefault(split, {})
        doubled = (gap.abs() > math.log(2)).double()
        found = {
            f"{prefix}abs": gap.abs(),
            f"{prefix}k3": kl_estimate(-gap, torch.zeros_like(gap), "k3"),
            f"{prefix}f2": doubled,
        }
        found |= {} if prefix else {"tokens": mask.double()}
        for name, values in found.items():
            kept.setdefault(name, []).extend(values.sum(1).tolist())

    def write(self, folder: Path) -> None:
        """Write what was kept to `sequences.json` in a folder."""
        (folder / FILE).write_text(json.dumps(self.sums), encoding="utf-8")


def flips_of(recorded: RoutingTrace, native: RoutingTrace) -> float:
    """Return the (token, layer) pairs of a response whose sets of experts differ.

    Args:
        recorded: The engine's routes, which may lack the prompt's first tokens and lack the last token's.
        native: The trainer's own, of every token.
    """
    own = native.slice(recorded.start, recorded.start + recorded.rows)
    ours, theirs = (trace.experts.int().sort(-1).values for trace in (own, recorded))
    return float((ours != theirs).any(-1).sum())


def read_sequences(folder: Path) -> Sums:
    """Read the sums that a run wrote."""
    return json.loads((folder / FILE).read_text(encoding="utf-8"))


MEASURES = {"abs": "mean|Δlogp|", "k3": "k3"}


def times_larger(first: Sums, second: Sums, split: str, measure: str) -> Interval:
    """Return how many times larger a mean per token is in the first run than in the second."""
    samples = [(run[split][measure], run[split]["tokens"]) for run in (first, second)]
    return bootstrap_quotient(samples[0], samples[1])


def left_by_replay(run: Sums, split: str, measure: str) -> Interval:
    """Return a mean with replay over the mean without it, on the same tokens: below 1, replay helps."""
    return bootstrap_ratio(run[split][measure], run[split][f"native/{measure}"])


def without_flips(run: Sums, split: str) -> float:
    """Return k3 per token, without replay, of the responses on which engine and trainer chose the same experts throughout.

    This is the k3 that rounding alone makes, independent of replay; 0 if every response has a flip. Responses without a flip are
    shorter and more certain than others, so the figure is too small rather than too large.
    """
    kept = {name: np.asarray(run[split][name]) for name in ("flips", "native/k3", "tokens")}
    calm = kept["flips"] == 0
    return float(kept["native/k3"][calm].sum() / kept["tokens"][calm].sum()) if calm.any() else 0.0


def over_halfway(run: Sums, split: str) -> Interval:
    """Return k3 with replay, divided by the level halfway between k3 without replay and k3 of responses without a flip.

    Below 1, replay has removed more than half of what flips add to k3; a replay that does nothing gives 1 or more.
    """
    native, tokens = (np.asarray(run[split][name]) for name in ("native/k3", "tokens"))
    # Rounding alone cannot exceed rounding plus flips, whatever a small sample says.
    level = min(without_flips(run, split), float(native.sum() / tokens.sum()))
    return bootstrap_ratio(run[split]["k3"], (native + level * tokens) / 2)


def judged_replay(run: Sums, split: str) -> dict[str, Any]:
    """Return the figures that show whether replay works: k3 left by it, k3 over halfway, rounding's share of k3 without it."""
    level = without_flips(run, split) * sum(run[split]["tokens"]) / sum(run[split]["native/k3"])
    found = {"left": left_by_replay(run, split, "k3"), "over halfway": over_halfway(run, split)}
    return {**{name: interval.to_dict() for name, interval in found.items()}, "share of rounding": level}


def of_float32_rounding(run: Sums, split: str, measure: str) -> Interval:
    """Return the gap between a float32 engine and trainer, divided by the trainer's own rounding error on the same tokens."""
    return bootstrap_ratio(run[split][measure], run[split][f"rounding/{measure}"])
