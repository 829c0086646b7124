"""Losses as users write them around TRL's own, and what each comes to by hand.

The hand's side is written from the papers' and TRL's formulas on the logits of the model's plain forward pass, in float64; it
uses nothing of the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from mismatch_ext.adapters.trl import MismatchGRPOTrainer, MismatchTrainerMixin
from torch import Tensor
from trl import GRPOTrainer

Inputs = dict[str, Any]

WITHOUT = ("none", "detached", "times_zero", "only_logged")
"""Ways of calling TRL's own loss that leave nothing of it in the loss."""
OWN_LOSS = ("none", "only_logged")
"""Those of them that make a loss of their own."""


@dataclass(frozen=True)
class Extra:
    """A term that a user adds: alpha times the mean of some scores."""

    kind: str
    alpha: float = 1.0
    before: bool = False
    asks_entropy: bool = False


@dataclass(frozen=True)
class Recipe:
    """A user's loss: scale * TRL's own + extra terms.

    Attributes:
        call: How TRL's own loss is called.
        entry: The method that is overridden.
        scores_twice: Whether the scoring pass is overridden too, by one that scores other tokens before and after.
    """

    call: str = "super"
    scale: float = 1.0
    extras: tuple[Extra, ...] = ()
    entry: str = "_compute_loss"
    in_place: bool = False
    scores_twice: bool = False
    mixin_first: bool = True
    micro_batches: int = 1
    loss_type: str = "dr_grpo"

    @property
    def outside(self) -> bool:
        """Whether the block's terms stand outside of this loss, because our class is before the user's."""
        return self.mixin_first and self.entry == "_compute_loss"

    def refused(self, asked: Asked) -> bool:
        """Tell whether a block is refused with this loss: it would be off, or its terms have no pass to be made of."""
        if not self.outside:
            return self.call in OWN_LOSS or (self.call == "unbound" and not self.mixin_first)
        if asked.correction == "bypass_reinforce":
            return True  # it would be given advantages of 0
        without = self.call in (*OWN_LOSS, "detached") and asked.correction is not None
        return without or (self.call == "halves" and asked.kl is not None)


RECIPES = (
    Recipe(),
    Recipe(scale=2.0, extras=(Extra("nll", 2.0, before=True),), micro_batches=2, loss_type="grpo"),
    Recipe(
        scale=-1.0,
        extras=(Extra("entropy"), Extra("other_rows", 0.5)),
        in_place=True,
        mixin_first=False,
        loss_type="bnpo",
    ),
    Recipe(
        extras=(Extra("longer_rows", -0.5), Extra("nll", before=True, asks_entropy=True)),
        scores_twice=True,
        loss_type="dapo",
    ),
    Recipe(scale=0.5, extras=(Extra("altered_prompt", before=True),), entry="compute_loss", micro_batches=2),
    Recipe(extras=(Extra("nll", 0.0, asks_entropy=True),), entry="compute_loss", scores_twice=True, mixin_first=False),
    Recipe("unbound", extras=(Extra("nll"),), mixin_first=False, micro_batches=2, loss_type="dapo"),
    Recipe("halves", scale=0.5, extras=(Extra("entropy", before=True),), loss_type="grpo"),
    Recipe("twice", in_place=True, scores_twice=True, mixin_first=False, loss_type="bnpo"),
    Recipe("logged_first", extras=(Extra("other_rows", before=True),), micro_batches=2),
    *(Recipe(call, mixin_first=first, extras=(Extra("nll"),)) for call in WITHOUT for first in (True, False)),
    Recipe("none", entry="compute_loss"),
    Recipe("only_logged", in_place=True, scores_twice=True, micro_batches=2),
)


def rows_of(inputs: Inputs, rows: Any) -> Inputs:
    """Return some rows of a micro-batch."""
    size = len(inputs["completion_ids"])
    return {
        key: value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == size else value
        for key, value in inputs.items()
    }


def halves(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Split a micro-batch in two."""
    middle = len(inputs["completion_ids"]) // 2
    return rows_of(inputs, slice(middle)), rows_of(inputs, slice(middle, None))


def tokens_of(kind: str, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what a term scores: tokens, attention mask, completions and their mask."""
    prompts, completions = inputs["prompt_ids"], inputs["completion_ids"]
    prompt_mask, mask = inputs["prompt_mask"], inputs["completion_mask"]
    if kind == "altered_prompt":
        prompts = torch.full_like(prompts, 9)
    elif kind in ("other_rows", "longer_rows"):
        rows, width = completions.shape
        width += 3 if kind == "longer_rows" else 0
        rows += 1 if kind == "longer_rows" else 0
        places = torch.arange(rows * width).view(rows, width)
        completions, mask = 4 + places % 11, torch.ones_like(places)
        prompts, prompt_mask = (
            completions[:, :1].expand(rows, prompts.size(1)),
            mask[:, :1].expand(rows, prompts.size(1)),
        )
    return torch.cat([prompts, completions], 1), torch.cat([prompt_mask, mask], 1), completions, mask


class Losses:
    """Overrides the methods of a GRPOTrainer that make its loss, as `recipe` says."""

    recipe: Recipe
    calls = 0

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        score = self._plainly  # in float64, where TRL's own pass rounds to float32
        if not self.recipe.scores_twice:
            return score(model, input_ids, *args, **kwargs)
        with torch.no_grad():
            score(model, torch.full_like(input_ids, 7), *args, **kwargs)
        scores = score(model, input_ids, *args, **kwargs)
        with torch.no_grad():
            score(model, torch.full_like(input_ids, 8), *args, **kwargs)
        return scores

    def _plainly(self, model: Any, ids: Tensor, attention: Tensor, length: int, **options: Any) -> Any:
        logps, table = scored(model, ids, attention, ids[:, -length:])
        entropies = -(table.exp() * table).sum(-1)
        return logps, entropies if options.get("compute_entropy") else None, None

    def compute_loss(self, model: Any, inputs: Inputs, *args: Any, **kwargs: Any) -> Tensor:
        parent: Any = super()
        if self.recipe.entry != "compute_loss":
            return parent.compute_loss(model, inputs, *args, **kwargs)
        return self._made(model, inputs, lambda given: parent.compute_loss(model, given, *args, **kwargs))

    def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
        parent: Any = super()
        if self.recipe.entry != "_compute_loss":
            return parent._compute_loss(model, inputs)
        return self._made(model, inputs, lambda given: parent._compute_loss(model, given))

    def _made(self, model: Any, inputs: Inputs, own: Any) -> Tensor:
        self.calls += 1
        recipe = self.recipe
        terms = [self._extra(model, inputs, extra) for extra in recipe.extras if extra.before]
        loss = self._own(model, inputs, own)
        terms += [self._extra(model, inputs, extra) for extra in recipe.extras if not extra.before]
        if recipe.in_place:
            loss *= recipe.scale
            for term in terms:
                loss += term
            return loss
        return sum(terms, start=recipe.scale * loss)

    def _own(self, model: Any, inputs: Inputs, own: Any) -> Tensor:
        call = self.recipe.call
        if call == "unbound":
            return GRPOTrainer._compute_loss(self, model, inputs)  # type: ignore[arg-type]
        if call == "halves":
            first, second = halves(inputs)
            return (own(first) + own(second)) / 2
        if call == "twice":
            return own(inputs) / 4 + own(inputs) * 3 / 4
        if call in ("logged_first", "only_logged"):
            with torch.no_grad():
                own(inputs)
        if call in ("none", "only_logged"):
            ids, attention, completions, mask = tokens_of("same", inputs)
            logps = self._get_per_token_logps_and_entropies(model, ids, attention, completions.size(1))[0]
            return -(logps * inputs["advantages"][:, None] * mask).sum() / 100
        loss = own(inputs)
        return {"detached": loss.detach() + 0 * self._anything(model), "times_zero": loss * 0}.get(call, loss)

    def _anything(self, model: Any) -> Tensor:
        return next(model.parameters()).sum()

    def _extra(self, model: Any, inputs: Inputs, extra: Extra) -> Tensor:
        ids, attention, completions, mask = tokens_of(extra.kind, inputs)
        entropy = extra.asks_entropy or extra.kind == "entropy"
        with torch.set_grad_enabled(extra.alpha != 0):
            logps, entropies, _ = self._get_per_token_logps_and_entropies(  # as TRL itself calls it
                model, ids, attention, completions.size(1), compute_entropy=entropy
            )
        scores = entropies if extra.kind == "entropy" else logps
        return -extra.alpha * (scores * mask).sum() / mask.sum()


class Users(Losses, GRPOTrainer):
    """A user's trainer."""


class MixinFirst(MismatchTrainerMixin, Users):
    """The user's trainer with ours before it, as README says."""


class MixinLast(Losses, MismatchGRPOTrainer):
    """A user's loss before our trainer."""


# By hand.


@dataclass(frozen=True)
class Asked:
    """What a block asks for, in plain numbers.

    Attributes:
        kl: estimator, placement, target, ratio, baseline; None for no KL.
        correction: Name of one of `scenarios_objective.CORRECTIONS`; None for none.
    """

    kl: dict[str, str] | None
    correction: str | None
    coef: float = 0.4


def scored(model: Any, tokens: Tensor, attention: Tensor, completions: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of completions `[B, T]` and of the vocabulary `[B, T, V]`, float64."""
    logits = model(input_ids=tokens, attention_mask=attention).logits[:, -completions.size(1) - 1 : -1].double()
    table = logits.log_softmax(-1)
    return table.gather(-1, completions[..., None])[..., 0], table


def by_hand(trainer: Any, inputs: Inputs, recipe: Recipe, asked: Asked) -> Tensor:
    """Return a user's loss on a micro-batch, with the block's terms where our class stands among the bases."""
    model = trainer.model
    if recipe.call in OWN_LOSS:
        ids, attention, completions, mask = tokens_of("same", inputs)
        own = -(scored(model, ids, attention, completions)[0] * inputs["advantages"][:, None] * mask).sum() / 100
    else:
        parts = halves(inputs) if recipe.call == "halves" else (inputs,)
        own = sum(own_by_hand(trainer, part, recipe, asked, inside=not recipe.outside) for part in parts) / len(parts)
    loss = own * (0.0 if recipe.call in ("detached", "times_zero") else recipe.scale)
    if recipe.outside:
        loss = (
            loss
            + own_by_hand(trainer, inputs, recipe, asked, inside=True)
            - own_by_hand(trainer, inputs, recipe, asked, inside=False)
        )
    for extra in recipe.extras:
        ids, attention, completions, mask = tokens_of(extra.kind, inputs)
        logps, table = scored(model, ids, attention, completions)
        scores = -(table.exp() * table).sum(-1) if extra.kind == "entropy" else logps
        loss = loss - extra.alpha * (scores * mask).sum() / mask.sum()
    return loss


def own_by_hand(trainer: Any, inputs: Inputs, recipe: Recipe, asked: Asked, *, inside: bool) -> Tensor:
    """Return TRL's own loss, weighed as a block asks for; `inside` with its terms too."""
    ids, attention, completions, mask = tokens_of("same", inputs)
    chosen = mask.bool()
    logps = scored(trainer.model, ids, attention, completions)[0]
    advantages = inputs["advantages"].double()[:, None]
    rollout = inputs["sampling_per_token_logps"].double()
    old = inputs["old_per_token_logps"].double() if "old_per_token_logps" in inputs else logps.detach()
    ratio = (logps - old).exp()
    if asked.correction == "bypass_reinforce" and not inside:
        term = torch.zeros_like(logps)
    elif asked.correction == "bypass_reinforce":
        total = torch.where(chosen, logps.detach() - rollout, 0.0).sum(1, keepdim=True).exp()
        term = -advantages * total.clamp(max=1.002) * logps
    else:
        term = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        term = term * weights_by_hand(asked.correction, inputs["old_of_trainer"].double(), rollout, chosen)
    if asked.kl is not None and inside:
        reference = inputs["ref_per_token_logps"].double()
        term = term + asked.coef * kl_by_hand(
            logps, reference, rollout, chosen, inputs["mismatch_kl_baseline"], asked.kl
        )
    term = torch.where(chosen, term, 0.0)
    accumulation = recipe.micro_batches
    if recipe.loss_type == "grpo":
        return (term.sum(1) / mask.sum(1)).mean() / accumulation
    if recipe.loss_type == "bnpo":
        return term.sum() / mask.sum() / accumulation
    if recipe.loss_type == "dr_grpo":
        return term.sum() / (len(mask) * trainer.max_completion_length) / accumulation
    return term.sum() / (inputs["num_items_in_batch"].double() * accumulation / trainer.args.steps_per_generation)


def weights_by_hand(name: str | None, old: Tensor, rollout: Tensor, chosen: Tensor) -> Tensor:
    """Return the weight of each token `[B, T]`."""
    ratio = torch.where(chosen, (old - rollout).exp(), 1.0)
    total = torch.where(chosen, old - rollout, 0.0).sum(1, keepdim=True)
    mean = (total / chosen.sum(1, keepdim=True)).exp().expand_as(ratio)
    product = total.exp().expand_as(ratio)
    inside = {"near": lambda x: (x >= 0.999) & (x <= 1.001), "below": lambda x: x <= 1.002}
    if name == "token_truncate":
        return ratio.clamp(max=1.002)
    if name == "token_mask":
        return torch.where(inside["below"](ratio), ratio, 0.0)
    if name == "sequence_truncate":
        return product.clamp(max=1.002)
    if name == "sequence_mask":
        return torch.where(inside["below"](product), product, 0.0)
    if name == "geometric":
        return torch.where(inside["near"](mean), mean, 0.0)
    if name == "rejecting":
        return torch.where(inside["near"](mean), ratio.clamp(max=2.0), 0.0)
    return torch.ones_like(ratio)


def kl_by_hand(
    logps: Tensor, reference: Tensor, rollout: Tensor, chosen: Tensor, baseline: Tensor, kl: dict[str, str]
) -> Tensor:
    """Return a term `[B, T]` with the gradient that the KL term is documented to have (docs/kl.md)."""
    d = torch.where(chosen, logps - reference, 0.0)
    k = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d, "abs": d.abs()}[kl["estimator"]]
    rho = torch.where(chosen, (logps.detach() - rollout).exp(), 1.0)
    weight = {"none": torch.ones_like(rho), "token": rho, "sequence": rho.cumprod(1)}[kl["ratio"]]
    later = (weight * k if kl["ratio"] == "sequence" else k).detach()
    if kl["target"] == "sequence":
        later = later.flip(1).cumsum(1).flip(1)
    credit = weight * later if kl["ratio"] == "token" else later
    if kl["baseline"] == "leave_one_out":
        credit = credit - weight * baseline.double()
    parts = {"loss": weight * k, "reward": credit * logps, "both": weight * k + credit * logps}
    return parts[kl["placement"]]
