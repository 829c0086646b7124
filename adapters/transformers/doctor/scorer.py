"""The trainer's side of the doctor: score sampled tokens with a model, in the run's arithmetic and as a float32 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.transformers.attention import (
    REFERENCE,
    attending_by,
    complete_implementation,
    implementation_of,
    trainer_implementation,
    without_caps,
)
from mismatch_ext.adapters.transformers.doctor.models import end_tokens, routing_shape
from mismatch_ext.adapters.transformers.head import head_of, in_float32
from mismatch_ext.adapters.transformers.routing import record_routing, replay_routing
from mismatch_ext.adapters.transformers.scoring import evaluating, logits_width
from torch import Tensor, nn
from torch.func import functional_call

from mismatch_ext.doctor import Sample, Scores
from mismatch_ext.doctor.evidence import Rung
from mismatch_ext.doctor.fits import own_rounding
from mismatch_ext.doctor.logits import Logits, score_tokens
from mismatch_ext.doctor.sample import Floats, Integers
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.dtypes import torch_dtype
from mismatch_ext.routing import RoutingShape, RoutingTrace, agreement, align, align_packed

# Most rows of logits that are in float64 at once.
PICKED = 512
# Most responses by which a cause's parameter is chosen.
SCREENED = 64
# Why a run's own log-probabilities differ from those of its weights in a plain pass.
COMPUTED = "the run's own pass (its padding, positions, kernels, adapters)"
# Most elements of a batch's logits, 256 MiB in float32, and most rows of a batch, which are as many as the tests run with.
MOST_LOGITS, MOST_ROWS = 2**26, 64
Prompt = Callable[[tuple[int, ...]], tuple[int, ...]]
# Most elements of logits that are kept: 512 MiB in float32.
KEPT = 2**27
# A share of the largest logit; applying a head again changes logits by less than this, through rounding.
NEAR = 1e-4
# Tokens of each sequence by which it is tried whether packed sequences see one another.
PACKED_TOKENS = 16
# Layouts that a run's trainer may use, by the value of --trainer-layout.
LAYOUTS = {
    "right": "padding on the right",
    "left": "prompts padded on the left, without position_ids",
    "left-positions": "prompts padded on the left, with position_ids",
    "packed": "sequences packed into one row",
}
# Most responses that each rung is measured on, and responses of a batch, as in a trainer; and the elements of logits that a rung
# may compute: 682 tokens of a vocabulary of 49,152.
ROWS, BATCH = 32, 8
RUNG_LOGITS = 2**25
# Responses that are computed in float64, and the most parameters of a model that is.
FLOAT64_ROWS, FLOAT64_PARAMETERS = 4, 2**31


class Scorer:
    """Scores one sample's tokens with a model that can be changed.

    Args:
        model: The model in float32. Once the trainer's scores are known, its weights are rounded to the engine's dtype, for good;
            where `computed` is given, what rounding takes away is kept in host memory, and `as_trainer` puts it back.
        sample: The tokens, with the engine's routes if it recorded them.
        trainer_dtype: The dtype that the trainer computes in, under autocast unless it is float32.
        engine_dtype: The dtype that the engine's weights are rounded to.
        temperature: The trainer divides logits by it.
        trainer_weights: The dtype in which the trainer holds or gathers its weights while it computes.
        replays: Whether the trainer replays the engine's routes.
        layout: How the trainer lays out sequences in a batch, a key of `LAYOUTS`.
        head: "float32" if the trainer's head computes in it and the rest of the model does not; otherwise "".
        attention: The trainer's attention implementation; "" for the model's own. The oracle has the one that computes all of
            the model's attention.
        computed: The log-probabilities that a run's trainer itself computed `[N]`. Then the trainer's layout is not tried, and
            its own noise is not measured. None computes them with the model.
        bare: Leave out what only a cause is named by: the trainer's own noise, and a head in float32.

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
        attention: str = "",
        computed: Floats | None = None,
        bare: bool = False,
    ) -> None:
        self.model, self.sample, self.temperature = model, sample, temperature
        self.engine_dtype = torch_dtype(engine_dtype)
        self.shape = routing_shape(model)
        self._passes = partial(passes, model, shape=self.shape)
        weights_dtype = torch_dtype(trainer_weights)
        self._head = head_of(model)
        if head and self._head is None:
            raise ConfigError(f"--trainer-head: {type(model).__name__} has no linear head; leave the option out.")
        self._trainer = (torch_dtype(trainer_dtype), weights_dtype, self._head if head else None)
        self._trainers_weights: dict[str, Tensor] = {}  # once they are rounded in the model
        self._attention = trainer_implementation(model, attention)
        self._complete = complete_implementation(model)
        if implementation_of(model) != self._complete:
            model.set_attn_implementation(self._complete)  # type: ignore[operator]
        round_weights(model, weights_dtype)
        self._float32_error = self._measured_float32_error()
        # As in the run, routes are replayed only if its block says so; otherwise the doctor shows what other routes cost.
        self._replayed = sample.routes if replays and self.shape is not None else None
        trainers, taken = self._trainers_side(layout, computed, bare)
        if computed is not None:
            self._trainers_weights = lost_by_rounding(model, self.engine_dtype)
        round_weights(model, self.engine_dtype)
        self._as_prompt: Scores | None = None  # `rescored` of the sample's own tokens
        self.scores = Scores(
            **trainers,
            **self._oracles_side(taken, bare, scored="logits" in trainers),
            temperature=temperature,
            end_tokens=end_tokens(model),
            engine_dtype=engine_dtype,
            trainer_dtype=trainer_dtype,
            trainer_head=head,
        )

    def _trainers_side(
        self, layout: str, computed: Floats | None, bare: bool
    ) -> tuple[dict[str, Any], tuple[RoutingTrace, ...] | None]:
        """Return the fields of `Scores` that need the trainer's weights, and the routes that it took, None if not known."""
        fields: dict[str, Any] = {}
        taken = None
        if self._trains_as_oracle:
            # One pass is then the trainer's, the oracle's, and that of the trainer's arithmetic in the engine's dtype.
            fields |= self._oracles_logits(self.sample)
            plain = fields["own"]
        else:
            with self.as_trainer():
                if self._replayed is None:
                    plain, taken = self._native()
                else:
                    plain = self._scored(self._replayed)
        if self._leaves_out:
            fields["attention"] = self._attention
            with self.as_trainer(complete=True):
                fields["attended"] = self._scored(self._replayed)
                with without_caps(self.model):
                    fields["capless"] = self._scored(self._replayed)
        if computed is not None:
            fields |= {"trainer": computed, "straight": plain, "layout": COMPUTED}
        elif layout != "right":
            laid_out = self.in_layout(self.sample, layout, routes=self._replayed)
            fields |= {"trainer": laid_out, "straight": plain, "layout": LAYOUTS[layout]}
        else:
            fields["trainer"] = plain
        if computed is None and not bare:
            fields["rungs"] = tuple(own_noise(self, layout))
        return fields, taken

    def _oracles_side(self, taken: tuple[RoutingTrace, ...] | None, bare: bool, *, scored: bool) -> dict[str, Any]:
        """Return the fields of `Scores` that need weights in the engine's dtype; `taken` are the trainer's own routes."""
        fields: dict[str, Any] = {"float32_error": self._float32_error, **self._flips()}
        if taken is not None and self.sample.routes is not None:
            fields["native"] = self._scored(taken)
        if not scored:
            fields |= self._oracles_logits(self.sample)
        if not bare and self._head is not None and self.engine_dtype != torch.float32:
            fields["headed"] = self._cast(self.sample, self._head)
        return fields

    def _oracles_logits(self, sample: Sample, logits: Tensor | Logits | None = None) -> dict[str, Any]:
        """Return the oracle's logits, what they score, and what the same weights do in the engine's dtype."""
        logits = self._logits(sample) if logits is None else logits
        exact = score_tokens(sample, logits, self.temperature)
        # In float32 these are the oracle's.
        own = exact[0] if self.engine_dtype == torch.float32 else self._cast(sample)
        return {"logits": logits, "exact": exact, "own": own}

    def rescored(self, sample: Sample) -> Scores:
        """Return the oracle's scores of the same tokens with a sample's routes, at temperature 1, as engines score prompts."""
        routed = sample.routes is not None or self.sample.routes is not None
        same = sample.prompts == self.sample.prompts and sample.responses == self.sample.responses and not routed
        if same and self._as_prompt is not None:
            return self._as_prompt
        before, self.temperature = self.temperature, 1.0
        try:
            if same and before == 1:
                fields: dict[str, Any] = {name: getattr(self.scores, name) for name in ("logits", "exact", "own")}
            else:
                fields = self._oracles_logits(sample, self.scores.logits if same else None)
        finally:
            self.temperature = before
        rescored = Scores(trainer=fields["own"], float32_error=before * self._float32_error, **fields)
        if same:
            self._as_prompt = rescored
        return rescored

    def logprobs(self, *, prompt: Prompt | None = None, screen: bool = False) -> Floats:
        """Return the tokens' log-probabilities `[N]` under the model as it is now.

        If prompts are changed, the model routes itself, because the engine's routes belong to other tokens. With `screen`, only
        some of the responses that fit are scored; tokens of the others are NaN.
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
        training: bool = False,
        prompt_width: int = 0,
    ) -> Floats:
        """Return log-probabilities `[N]` of a sample's tokens under another layout, in the trainer's dtype unless `exact`.

        With `training`, dropout is active. Prompts on the left are padded to `prompt_width`, or to the longest of the batch.
        """
        how: dict[str, Any] = {
            "layout": layout,
            "most_rows": most_rows,
            "training": training,
            "prompt_width": prompt_width,
        }
        with nullcontext() if exact else self.as_trainer():
            row_logprobs = [self._picked(row, logits, sample) for row, logits in self._passes(sample, routes, **how)]
        return self._joined(row_logprobs)

    @contextmanager
    def as_trainer(self, *, complete: bool = False) -> Iterator[None]:
        """Compute as the run's trainer does; with `complete`, by an attention that computes all of the model."""
        attention = self._complete if complete else self._attention
        with unrounded(self.model, self._trainers_weights, self.engine_dtype):
            with as_trainer(self.model, *self._trainer, attention):
                yield

    @property
    def _leaves_out(self) -> bool:
        """Whether the trainer's attention may leave out a part of the model that the oracle's computes."""
        return self._complete == REFERENCE and self._attention != REFERENCE

    @property
    def trains_exactly(self) -> bool:
        """Whether the trainer computes as the oracle does, where both have the same weights and routes."""
        dtype, weights_dtype, _ = self._trainer
        return dtype == weights_dtype == torch.float32 and self._attention == self._complete

    @property
    def _trains_as_oracle(self) -> bool:
        """Whether the trainer's pass is the oracle's."""
        return self.trains_exactly and self.engine_dtype == torch.float32 and self.shape is None

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _scored(self, routes: tuple[RoutingTrace, ...] | None, **changes: Any) -> Floats:
        row_logprobs = [self._picked(row, logits) for row, logits in self._passes(self.sample, routes, **changes)]
        return self._joined(row_logprobs)

    def _native(self) -> tuple[Floats, tuple[RoutingTrace, ...] | None]:
        """Return the tokens' log-probabilities under the model's own routes, and those routes."""
        taken: dict[int, RoutingTrace] = {}
        row_logprobs = [self._picked(row, logits) for row, logits in self._passes(self.sample, None, taken=taken)]
        return self._joined(row_logprobs), tuple(taken[row] for row in sorted(taken)) or None

    def _flips(self) -> dict[str, Any]:
        """Return how the model's own routes differ from the engine's, and from its dtype's; nothing without routes."""
        if self.shape is None or self.sample.routes is None:
            return {}
        _, exact = self._native()
        with self.cast(self.engine_dtype):
            _, rounded = self._native()
        assert exact is not None and rounded is not None  # a model with experts has routes
        flips = differing(self.sample.routes, exact), differing(rounded, exact)
        return {"flips": flips, "most_flips": most_differing(self.sample.routes, exact)}

    def _logits(self, sample: Sample) -> Tensor | Projected:
        """Return the tokens' logits `[N, V]`: kept if they are few, otherwise projected whenever they are read."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        counts = [sum(mask) for mask in sample.masks]
        starts = np.cumsum([0, *counts])
        width = logits_width(self.model) or 0
        if starts[-1] * width <= KEPT or not self._projects(head, sample):
            head = None
        outputs = None
        with nullcontext() if head is None else passing_hidden(head):
            for row, output in self._passes(sample, sample.routes):
                if outputs is None:
                    outputs = torch.empty(int(starts[-1]), output.shape[-1], dtype=torch.float32)
                outputs[starts[row] : starts[row + 1]] = output[torch.tensor(sample.masks[row])].float().cpu()
        assert outputs is not None  # a sample has responses
        return outputs if head is None else Projected(head, outputs, width)

    def _projects(self, head: nn.Module | None, sample: Sample) -> bool:
        """Tell, by one response, whether only the head turns hidden states into logits."""
        if head is None:
            return False
        row = min(range(len(sample.masks)), key=lambda row: len(sample.prompts[row]) + len(sample.responses[row]))
        _, logits = next(iter(self._passes(sample, None, only=[row])))
        with passing_hidden(head):
            _, hidden = next(iter(self._passes(sample, None, only=[row])))
        return is_head(head, hidden, logits)

    def _cast(self, sample: Sample, exact: nn.Linear | None = None) -> Floats:
        """Return the log-probabilities of a pass in the engine's dtype, but for a head that has to be exact."""
        with self.cast(self.engine_dtype), in_float32(exact):
            row_logprobs = [self._picked(row, logits, sample) for row, logits in self._passes(sample, sample.routes)]
        return self._joined(row_logprobs)

    @property
    def float32_error(self) -> float:
        """What float32 errs on this model, in nats per token at the trainer's temperature: `Scores.float32_error`."""
        return self._float32_error

    def _measured_float32_error(self) -> float:
        """Measure the mean of |float32 - float64| on a few responses, with the experts that float32 chooses."""
        sampled = [row for row, mask in enumerate(self.sample.masks) if any(mask)]
        places = np.linspace(0, len(sampled) - 1, FLOAT64_ROWS).astype(int).tolist()
        few = self.sample.part([sampled[place] for place in dict.fromkeys(places)])
        taken: dict[int, RoutingTrace] | None = None if self.shape is None else {}
        picked: list[tuple[int, Floats]] = []
        largest_logits: list[float] = []
        for row, logits in self._passes(few, None, taken=taken):
            picked.append(self._picked(row, logits, few))
            finite = logits[logits.isfinite()]
            largest_logits.append(float(finite.abs().max()) / self.temperature)
        plain = self._joined(picked)
        routes = tuple(taken[row] for row in sorted(taken)) if taken else None
        apart = self._float64(few, routes)
        if apart is None or not np.isfinite(apart).all():  # as where a model's masks overflow in another dtype
            apart = self._alone(few, routes)
        return own_rounding(float(np.abs(apart - plain).mean()), np.array(largest_logits), plain)

    def _float64(self, few: Sample, routes: tuple[RoutingTrace, ...] | None) -> Floats | None:
        """Return log-probabilities `[N]` in float64; None if the model is too large for it, or does not compute in it."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        if size > FLOAT64_PARAMETERS:
            return None
        try:
            with self.cast(torch.float64), experts_one_by_one(self.model):
                return self._joined([self._picked(row, logits, few) for row, logits in self._passes(few, routes)])
        except RuntimeError:  # a part of the model computes in float32 whatever its weights are in
            return None

    def _alone(self, few: Sample, routes: tuple[RoutingTrace, ...] | None) -> Floats:
        """Return log-probabilities `[N]` in float32 with each response in a batch of its own, whose sums have another order."""
        return self._joined([self._picked(row, logits, few) for row, logits in self._passes(few, routes, most_rows=1)])

    def cast(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Hold the weights in another dtype; buffers keep their dtype, as in a trainer."""
        return held_in(self.model, dtype)

    def _picked(self, row: int, logits: Tensor, sample: Sample | None = None) -> tuple[int, Floats]:
        return row, picked(logits, sample or self.sample, row, self.temperature)

    def _joined(self, row_logprobs: list[tuple[int, Floats]]) -> Floats:
        return np.concatenate([part for _, part in sorted(row_logprobs, key=lambda pair: pair[0])])


def picked(logits: Tensor, sample: Sample, row: int, temperature: float) -> Floats:
    """Return the log-probabilities of a response's sampled tokens under its logits `[T, V]`."""
    tokens = torch.tensor(sample.responses[row], device=logits.device)[:, None]
    logp = torch.cat(
        [
            (part.double() / temperature).log_softmax(-1).gather(-1, ids)[:, 0]
            for part, ids in zip(logits.split(PICKED), tokens.split(PICKED), strict=True)
        ]
    )
    return logp[torch.tensor(sample.masks[row])].cpu().numpy()


def trainer_logprobs(
    model: nn.Module, sample: Sample, *, dtype: str, temperature: float, attention: str = ""
) -> Floats:
    """Return the log-probabilities of a sample's tokens `[N]` in one pass, as a trainer of this dtype computes them."""
    with as_trainer(model, torch_dtype(dtype), torch.float32, None, trainer_implementation(model, attention)):
        scored = passes(model, sample, None, shape=routing_shape(model))
        of_row = {row: picked(logits, sample, row, temperature) for row, logits in scored}
    return np.concatenate([of_row[row] for row in sorted(of_row)])


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model's weights to a dtype, for good; they stay float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


def lost_by_rounding(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a copy in host memory of the parameters that `round_weights` would change."""
    return {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, parameter.to(dtype).to(parameter.dtype))
    }


@contextmanager
def unrounded(model: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Give a model the weights that `lost_by_rounding` has kept, and afterwards round them to the dtype again."""
    parameters = dict(model.named_parameters())
    try:
        with torch.no_grad():
            for name, tensor in weights.items():
                parameters[name].copy_(tensor)
        yield
    finally:
        with torch.no_grad():
            for name in weights:
                parameters[name].copy_(parameters[name].to(dtype))


@contextmanager
def held_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Hold a model's weights in a dtype that they are rounded to already, so that nothing is lost on the way there and back."""
    try:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parameter in model.parameters():
            parameter.data = parameter.data.float()


@contextmanager
def experts_one_by_one(model: nn.Module) -> Iterator[None]:
    """Compute each expert's product on its own, because grouped products do not exist in float64."""
    change = getattr(model, "set_experts_implementation", None)
    before = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if change is None or before is None:
        yield
        return
    change("eager")
    try:
        yield
    finally:
        change(before)


@contextmanager
def as_trainer(
    model: nn.Module, dtype: torch.dtype, weights_dtype: torch.dtype, head: nn.Linear | None, attention: str
) -> Iterator[None]:
    """Compute as a trainer does: under autocast to its dtype, with weights in the dtype that it keeps, and with an exact head.

    `attention` is the name of its attention implementation.
    """
    device = next(model.parameters()).device
    cast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
    weights = nullcontext() if weights_dtype == torch.float32 else held_in(model, weights_dtype)
    with attending_by(model, attention), cast, weights, in_float32(head):
        yield


def differing(routes: Sequence[RoutingTrace], others: Sequence[RoutingTrace]) -> float:
    """Return the share of (token, layer) with other sets of experts."""
    pairs = _of_same_rows(routes, others)
    return float(_apart(pairs).sum()) / sum(trace.rows * len(trace.layers) for trace, _ in pairs)


def _of_same_rows(
    routes: Sequence[RoutingTrace], others: Sequence[RoutingTrace]
) -> list[tuple[RoutingTrace, RoutingTrace]]:
    lengths = [min(trace.rows, other.rows) for trace, other in zip(routes, others, strict=True)]
    return [
        (trace.slice(0, rows), other.slice(0, rows)) for trace, other, rows in zip(routes, others, lengths, strict=True)
    ]


def _apart(pairs: Sequence[tuple[RoutingTrace, RoutingTrace]]) -> Tensor:
    """Count the tokens with other sets of experts, by layer `[L]`."""
    return torch.stack([agreement(trace, other)["set_mismatches"] for trace, other in pairs]).sum(0)


def most_differing(routes: Sequence[RoutingTrace], others: Sequence[RoutingTrace]) -> tuple[int, float]:
    """Return the layer in which most tokens have other sets of experts, and their share there."""
    pairs = _of_same_rows(routes, others)
    apart, place = _apart(pairs).max(0)
    tokens = sum(trace.rows for trace, _ in pairs)
    return routes[0].layers[int(place)], float(apart) / tokens


@dataclass(frozen=True, kw_only=True)
class Laid:
    """Sequences as a model is given them, and for each response its row, the column of its first token, and its whole length."""

    ids: Tensor  # [B, S]
    mask: Tensor | None  # None for a packed row, in which positions tell sequences apart
    positions: Tensor | None  # None if the model counts the columns
    places: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]


def laid(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], layout: str, prompt_width: int = 0
) -> Laid:
    """Lay prompts and responses into a batch. In TRL's layout, "left", all responses begin in one column.

    That column is at `prompt_width`, or further on if a prompt is longer.
    """
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    if layout == "packed":
        starts = np.cumsum([0, *map(len, rows)])[:-1]
        return Laid(
            ids=torch.tensor([[token for row in rows for token in row]]), mask=None,
            positions=torch.tensor([[at for row in rows for at in range(len(row))]]),
            places=tuple((0, int(start) + len(prompt)) for start, prompt in zip(starts, prompts, strict=True)),
            lengths=tuple(map(len, rows)),
        )  # fmt: skip
    longest = max(prompt_width, *map(len, prompts)) if layout.startswith("left") else 0
    before = [longest - len(prompt) if longest else 0 for prompt in prompts]
    width = max(left + len(row) for left, row in zip(before, rows, strict=True))
    fill = [(left, width - left - len(row)) for left, row in zip(before, rows, strict=True)]
    ids = torch.tensor([[0] * left + row + [0] * right for (left, right), row in zip(fill, rows, strict=True)])
    mask = torch.tensor(
        [[0] * left + [1] * len(row) + [0] * right for (left, right), row in zip(fill, rows, strict=True)]
    )
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if layout == "left-positions" else None
    places = tuple((row, left + len(prompt)) for row, (left, prompt) in enumerate(zip(before, prompts, strict=True)))
    return Laid(ids=ids, mask=mask, positions=positions, places=places, lengths=tuple(map(len, rows)))


def mixes_packed(model: nn.Module) -> bool:
    """Tell, by trying, whether a packed sequence sees the one before it, as in a recurrent state without boundaries."""
    ids = torch.randint(
        logits_width(model) or 2, (3, PACKED_TOKENS), generator=torch.Generator().manual_seed(0)
    ).tolist()
    given = [laid([first[:1], ids[2][:1]], [first[1:], ids[2][1:]], "packed") for first in ids[:2]]
    device = next(model.parameters()).device
    with torch.no_grad(), evaluating(model):
        one, other = (model(**_given(made, device), use_cache=False).logits[0, PACKED_TOKENS:] for made in given)
    return bool((one - other).abs().max() > NEAR * one.abs().max())


def own_noise(scorer: Scorer, layout: str) -> Iterator[Rung]:
    """Yield how much the trainer differs from itself in smaller batches, and in its layout, on some of the responses.

    `layout` is a key of `LAYOUTS`.
    """
    sample = scorer.sample
    sampled = [row for row, mask in enumerate(sample.masks) if any(mask)]
    length = len(sample.row) / len(sampled)
    affordable = RUNG_LOGITS // (logits_width(scorer.model) or 2**17)
    count = min(ROWS, max(BATCH, int(affordable / length)))
    part = sample.part(sampled[:: -(-len(sampled) // count)])
    straight = scorer.in_layout(part, "right", most_rows=BATCH)
    yield Rung.of("trainer", f"batches of 1 against {BATCH}", scorer.in_layout(part, "right", most_rows=1) - straight)
    if layout == "right":
        return
    moved = scorer.in_layout(part, layout, most_rows=BATCH)
    apart = exactly_apart = moved - straight
    if not scorer.trains_exactly:
        exact = [scorer.in_layout(part, each, most_rows=BATCH, exact=True) for each in (layout, "right")]
        exactly_apart = exact[0] - exact[1]
    yield Rung.of("trainer", LAYOUTS[layout], apart, exactly_apart, float32_error=scorer.float32_error)


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
    training: bool = False,
    prompt_width: int = 0,
) -> Iterator[tuple[int, Tensor]]:
    """Yield each response's row and logits `[T, V]`; batches hold responses of similar length, and no KV cache is used.

    `prompt` changes each prompt; `taken` is filled, by response, with the model's own routes, only with padding on the right.
    `prompt_width` is that of `laid`.
    """
    prompts = [prompt(ids) if prompt else ids for ids in sample.prompts]
    lengths = [len(ids) + len(response) for ids, response in zip(prompts, sample.responses, strict=True)]
    order = sorted(range(len(lengths)) if only is None else only, key=lengths.__getitem__, reverse=True)
    width = logits_width(model) or 2**17
    device = next(model.parameters()).device
    while order:
        count = max(1, min(most_rows, MOST_LOGITS // (lengths[order[0]] * width)))
        batch, order = order[:count], order[count:]
        made = laid([prompts[row] for row in batch], [sample.responses[row] for row in batch], layout, prompt_width)
        mode = evaluating(model, training=training)
        with torch.no_grad(), mode, _routed(model, shape, batch, made, routes, taken):
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


class Projected:
    """Logits `[N, V]` of the head's inputs `[N, H]` on the CPU; slices are computed when they are read, and not kept."""

    def __init__(self, head: nn.Module, hidden: Tensor, width: int) -> None:
        self._head, self._hidden = head, hidden
        self.shape = torch.Size((len(hidden), width))

    def __len__(self) -> int:
        return len(self._hidden)

    def __getitem__(self, rows: slice | Integers) -> Tensor:
        weights = {name: weight.to(self._hidden.dtype) for name, weight in self._head.named_parameters()}
        device = next(iter(weights.values())).device
        with torch.no_grad():
            logits: Tensor = functional_call(self._head, weights, self._hidden[rows].to(device))
        return logits.cpu()


def is_head(head: nn.Module, hidden: Tensor, logits: Tensor) -> bool:
    """Tell whether a model's logits are its head's output for hidden states, not capped, scaled or shifted after the head."""
    with torch.no_grad():
        again = head(hidden)
    return again.shape == logits.shape and bool((again - logits).abs().max() <= NEAR * logits.abs().max())


@contextmanager
def passing_hidden(head: nn.Module) -> Iterator[None]:
    """Let a model return the input of its head instead of its logits."""
    hook = head.register_forward_hook(lambda module, inputs, output: inputs[0])
    try:
        yield
    finally:
        hook.remove()
