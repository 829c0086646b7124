"""The trainer's side of the doctor: score sampled tokens with a model, in the run's arithmetic and as a float32 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers import doctor_logits
from mismatch_ext.adapters.transformers.doctor_head import head_of, in_float32
from mismatch_ext.adapters.transformers.doctor_layouts import LAYOUTS, own_noise
from mismatch_ext.adapters.transformers.doctor_logits import Projected, is_head, passing_hidden
from mismatch_ext.adapters.transformers.doctor_models import end_tokens, routing_shape
from mismatch_ext.adapters.transformers.doctor_passes import MOST_ROWS, Prompt, passes
from torch import Tensor, nn

from mismatch_ext.doctor import Cause, Sample, Scores
from mismatch_ext.doctor.sample import Floats
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.dtypes import torch_dtype
from mismatch_ext.routing import RoutingTrace

# Most rows of logits that are in float64 at once.
PICKED = 512
# Most responses by which a cause's parameter is chosen.
SCREENED = 64
# Why a run's own log-probabilities differ from those of its weights in a plain pass.
COMPUTED = "the run's own pass (its padding, positions, kernels, adapters)"


class Scorer:
    """Scores one sample's tokens with a model that can be changed.

    Args:
        model: The model in float32. Once the trainer's scores are known, its weights are rounded to the engine's dtype, for good.
        sample: The tokens, with the engine's routes if it recorded them.
        trainer_dtype: The dtype that the trainer computes in, under autocast unless it is float32.
        engine_dtype: The dtype that the engine's weights are rounded to.
        temperature: The trainer divides logits by it.
        trainer_weights: The dtype in which the trainer holds or gathers its weights while it computes.
        replays: Whether the trainer replays the engine's routes.
        layout: How the trainer lays out sequences in a batch, a key of `LAYOUTS`.
        head: "float32" if the trainer's head computes in it and the rest of the model does not; otherwise "".
        computed: The log-probabilities that a run's trainer itself computed `[N]`. Then the trainer's layout is not tried, and
            its own noise is not measured. None computes them with the model.

    Attributes:
        scores: The scores of the trainer's side, the oracle's among them, from which causes start.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        *,
        trainer_dtype: str,
        engine_dtype: str,
        temperature: float = 1.0,
        trainer_weights: str = "float32",
        replays: bool = False,
        layout: str = "right",
        head: str = "",
        computed: Floats | None = None,
    ) -> None:
        self.model, self.sample, self.temperature = model, sample, temperature
        self.engine_dtype = torch_dtype(engine_dtype)
        self.shape = routing_shape(model)
        self._passes = partial(passes, model, shape=self.shape)
        # As in the run, routes are replayed only if its block says so; otherwise the doctor shows what other routes cost.
        kept = torch_dtype(trainer_weights)
        self._head = head_of(model)
        if head and self._head is None:
            raise ConfigError(f"--trainer-head: {type(model).__name__} has no linear head; leave the option out.")
        self._trainer = (torch_dtype(trainer_dtype), kept, self._head if head else None)
        self._round(kept)
        replayed = replays and self.shape is not None and sample.routes is not None
        with self._as_trainer():
            straight, taken = (self._scored(sample.routes), None) if replayed else self._native()
        trainer, said = straight, "" if layout == "right" else LAYOUTS[layout]
        if computed is not None:
            trainer, said = computed, COMPUTED
        elif layout != "right":
            trainer = self.in_layout(sample, layout, routes=sample.routes if replayed else None)
        rungs = () if computed is not None else tuple(own_noise(self))
        self._round(self.engine_dtype)
        native = self._scored(taken) if taken is not None and sample.routes is not None else None
        self.scores = Scores(
            trainer=trainer,
            own=self._own(sample),
            logits=self._logits(sample),
            headed=None if self._head is None or self.engine_dtype == torch.float32 else self._own(sample, self._head),
            native=native,
            straight=straight if said else None,
            layout=said,
            rungs=rungs,
            temperature=temperature,
            end_tokens=end_tokens(model),
            engine_dtype=engine_dtype,
            trainer_dtype=trainer_dtype,
            trainer_head=head,
        )

    def rescored(self, sample: Sample) -> Scores:
        """Return the oracle's scores of the same tokens with a sample's routes, at temperature 1, as engines score prompts."""
        before, self.temperature = self.temperature, 1.0
        try:
            logits, own = self._logits(sample), self._own(sample)
            return Scores(trainer=own, own=own, logits=logits)
        finally:
            self.temperature = before

    def logprobs(self, *, prompt: Prompt | None = None, screen: bool = False) -> Floats:
        """Return the tokens' log-probabilities `[N]` under the model as it is now.

        Args:
            prompt: Changes each prompt; the model then routes itself, because the engine's routes belong to other tokens.
            screen: Whether to score only some of the responses that fit; tokens of the others are NaN.
        """
        routes = self.sample.routes if prompt is None else None
        if not screen:
            return self._scored(routes, prompt=prompt)
        row = self.sample.row
        chosen = np.unique(row[self.sample.fits])[:SCREENED].tolist()
        scored = np.full(len(row), np.nan)
        for at, logits in self._passes(self.sample, routes, prompt=prompt, only=chosen):
            scored[row == at] = self._picked(at, logits)[1]
        return scored

    def in_layout(
        self,
        sample: Sample,
        layout: str,
        *,
        routes: tuple[RoutingTrace, ...] | None = None,
        most_rows: int = MOST_ROWS,
        exact: bool = False,
    ) -> Floats:
        """Return log-probabilities `[N]` of a sample's tokens under another layout.

        Args:
            sample: The tokens.
            layout: A key of `LAYOUTS`.
            routes: The routes of each response; None lets the model route.
            most_rows: Largest number of responses in a batch.
            exact: Whether to compute in float32 instead of the trainer's dtype.
        """
        with nullcontext() if exact else self._as_trainer():
            found = [
                self._picked(row, logits, sample)
                for row, logits in self._passes(sample, routes, layout=layout, most_rows=most_rows)
            ]
        return self._joined(found)

    @contextmanager
    def _as_trainer(self) -> Iterator[None]:
        half, kept, exact = self._trainer
        cast = nullcontext() if half == torch.float32 else torch.autocast(self._device.type, half)
        with cast, nullcontext() if kept == torch.float32 else self.cast(kept), in_float32(exact):
            yield

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _scored(self, routes: tuple[RoutingTrace, ...] | None, **changes: Any) -> Floats:
        found = [self._picked(row, logits) for row, logits in self._passes(self.sample, routes, **changes)]
        return self._joined(found)

    def _native(self) -> tuple[Floats, tuple[RoutingTrace, ...] | None]:
        """Return the tokens' log-probabilities under the model's own routes, and those routes."""
        taken: dict[int, RoutingTrace] = {}
        found = [self._picked(row, logits) for row, logits in self._passes(self.sample, None, taken=taken)]
        return self._joined(found), tuple(taken[row] for row in sorted(taken)) or None

    def _logits(self, sample: Sample) -> Tensor | Projected:
        """Return the tokens' logits `[N, V]`: kept if they are few, otherwise projected whenever they are read."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        counts = [sum(mask) for mask in sample.masks]
        starts = np.cumsum([0, *counts])
        width = int(getattr(getattr(self.model, "config", None), "vocab_size", 0) or 0)
        if starts[-1] * width <= doctor_logits.KEPT or not self._projects(head, sample):
            head = None
        kept = None
        with nullcontext() if head is None else passing_hidden(head):
            for row, found in self._passes(sample, sample.routes):
                if kept is None:
                    kept = torch.empty(int(starts[-1]), found.shape[-1], dtype=torch.float32)
                kept[starts[row] : starts[row + 1]] = found[torch.tensor(sample.masks[row])].float().cpu()
        assert kept is not None  # a sample has responses
        return kept if head is None else Projected(head, kept, width)

    def _projects(self, head: nn.Module | None, sample: Sample) -> bool:
        """Tell, by one response, whether only the head turns hidden states into logits."""
        if head is None:
            return False
        row = min(range(len(sample.masks)), key=lambda row: len(sample.prompts[row]) + len(sample.responses[row]))
        _, logits = next(iter(self._passes(sample, None, only=[row])))
        with passing_hidden(head):
            _, hidden = next(iter(self._passes(sample, None, only=[row])))
        return is_head(head, hidden, logits)

    def _own(self, sample: Sample, exact: nn.Linear | None = None) -> Floats:
        """Return the log-probabilities of the same weights in the engine's dtype; buffers keep their dtype, as in a trainer.

        Args:
            sample: The tokens.
            exact: The head, if it has to compute in float32.
        """
        with self.cast(self.engine_dtype), in_float32(exact):
            found = [self._picked(row, logits) for row, logits in self._passes(sample, sample.routes)]
        return self._joined(found)

    def _round(self, dtype: torch.dtype) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(dtype))

    @contextmanager
    def cast(self, dtype: torch.dtype) -> Iterator[None]:
        """Hold the weights in another dtype; buffers keep their dtype, as in a trainer."""
        # Nothing is lost on the way there and back, because the weights are rounded to this dtype already.
        try:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(dtype)
            yield
        finally:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.float()

    def _picked(self, row: int, logits: Tensor, sample: Sample | None = None) -> tuple[int, Floats]:
        sample = sample or self.sample
        tokens = torch.tensor(sample.responses[row], device=logits.device)[:, None]
        logp = torch.cat(
            [
                (part.double() / self.temperature).log_softmax(-1).gather(-1, ids)[:, 0]
                for part, ids in zip(logits.split(PICKED), tokens.split(PICKED), strict=True)
            ]
        )
        return row, logp[torch.tensor(sample.masks[row])].cpu().numpy()

    def _joined(self, found: list[tuple[int, Floats]]) -> Floats:
        return np.concatenate([part for _, part in sorted(found, key=lambda pair: pair[0])])


def scored_under(scorer: Scorer, change: Callable[[float], Any], **given: Any) -> Cause:
    """Return a cause that predicts the engine's log-probabilities by a changed model.

    Args:
        scorer: The scorer of the sample.
        change: Maps the cause's parameter to a context in which the model computes as the engine would.
        given: Other fields of the `Cause`.
    """

    def predict(x: float, *, screen: bool = False) -> Floats:
        with change(x):
            return scorer.logprobs(screen=screen)

    return Cause(predict=predict, screen=partial(predict, screen=True), **given)
