"""Trainings under subclasses as users write them, and each of their steps by hand.

The hand's side is float64, row by row without padding, and uses nothing of the package: TRL's losses and the KL term by their
formulas, and the halved rate. What it takes from the run is the micro-batches and the weights before each step. The cases are in
tests/data/trl/by_hand.jsonl: arguments of TRL, a block, what a user's subclass does, and words of the error if it is refused.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin
from mismatch_ext.adapters.trl.rows import RowKey
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from examples.arithmetic.task import make_dataset
from mismatch_ext.errors import MismatchError
from mismatch_ext.sampling_mask import TokenSupport
from tests.commands import ROOT
from tests.peers.trl.scenarios_kl import moved

Inputs = dict[str, Any]
RATE, ALPHA, STEPS = 1e-2, 0.7, 3
NEAR, ROUNDING = 1e-3, 3e-6
"""Largest difference of an update, as a part of it and of all weights' rounding to float32."""
BOUNDS = {"old": 5e-5, "ref": 5e-5, "advantages": 5e-4, "weights": 5e-4}
"""Largest difference of what a batch has; advantages and weights divide by spreads and multiply over tokens."""


def cases_of(kind: str) -> list[dict[str, Any]]:
    """Return the cases of a kind."""
    lines = (ROOT / "tests/data/trl/by_hand.jsonl").read_text(encoding="utf-8").splitlines()
    return [case for case in map(json.loads, lines) if case["kind"] == kind]


def even(completions: list[str], **_: Any) -> list[float]:
    """Reward the share of even digits, and length."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) + 0.01 * len(text) for text in completions]


def parity(completions: list[str], **_: Any) -> list[float]:
    """Reward an even length, and ones."""
    return [(-1.0) ** len(text) * (1 + text.count("1")) for text in completions]


# A user's subclass.


def taken(batch: Inputs, rows: Tensor) -> Inputs:
    """Return some rows of a batch."""
    size = len(batch["completion_ids"])
    return {
        key: value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == size
        else [value[row] for row in rows.tolist()] if isinstance(value, list) and len(value) == size
        else value
        for key, value in batch.items()
    }  # fmt: skip


def joined(first: Inputs, second: Inputs) -> Inputs:
    """Return two batches of other widths as one."""
    sizes, result = (len(first["completion_ids"]), len(second["completion_ids"])), {}
    for key, value in first.items():
        other = second.get(key)
        of_rows = all(
            isinstance(part, Tensor) and part.dim() and len(part) == size
            for part, size in zip((value, other), sizes, strict=True)
        )
        if of_rows and value.dim() == 2:
            width = max(value.size(1), other.size(1))
            left = key.startswith("prompt_")
            value, other = (
                torch.nn.functional.pad(part, (width - part.size(1), 0) if left else (0, width - part.size(1)))
                for part in (value, other)
            )
        if of_rows:
            value = torch.cat([value, other])
        elif isinstance(value, list) and isinstance(other, list):
            value = value + other
        elif key == "num_items_in_batch":
            value = value + other
        result[key] = value
    return result


class User:
    """Changes the rows of a batch, and its loss."""

    user: dict[str, Any]
    more: list[dict[str, Any]]
    draws: torch.Generator
    previous: Inputs | None = None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Inputs:
        trainer: Any = super()
        batch: Inputs = trainer._generate_and_score_completions(inputs)
        changed = self.changed(batch)
        least = self.args.steps_per_generation  # type: ignore[attr-defined]  # TRL has no micro-batch without rows
        return changed if len(changed["completion_ids"]) >= least else batch

    def changed(self, batch: Inputs) -> Inputs:
        """Return the batch as this user wants it."""
        change, rows, group = self.user["change"], len(batch["completion_ids"]), self.num_generations  # type: ignore[attr-defined]
        groups = rows // group
        if change == "permuted":
            return taken(batch, torch.randperm(rows, generator=self.draws))
        if change == "row dropped":
            return taken(batch, torch.tensor([row for row in range(rows) if row % group]))
        if change == "refilled":
            kept = [1, *range(1, groups)] if groups > 1 else [0]
            return taken(batch, torch.tensor([number * group + row for number in kept for row in range(group)]))
        if change == "advantages by token":
            of_tokens = torch.linspace(0.5, 1.5, batch["completion_ids"].size(1))
            return batch | {"advantages": batch["advantages"][:, None] * of_tokens}
        if change == "tool mask":
            mask = batch["completion_mask"].clone()
            mask[:, ::3] = 0
            return batch | {"tool_mask": mask}
        if change == "replayed":
            previous, self.previous = self.previous, batch
            half = torch.arange(rows)
            return batch if previous is None else joined(
                taken(batch, half[: rows // 2]), taken(previous, half[rows // 2 :])
            )  # fmt: skip
        if change == "generated twice":
            prompts, self.more = self.more[:groups], self.more[groups:] + self.more[:groups]
            trainer: Any = super()
            both = joined(batch, trainer._generate_and_score_completions([p for p in prompts for _ in range(group)]))
            return taken(both, both["advantages"].abs().argsort(descending=True, stable=True)[:rows])
        return batch

    def _compute_loss(self, model: Any, inputs: Inputs) -> Tensor:
        call, trainer = self.user["call"], super()
        own: Any = trainer._compute_loss  # type: ignore[misc]
        if call == "halves" and len(inputs["completion_ids"]) > 1:
            return sum(own(model, part) for part in halves(inputs))  # type: ignore[return-value]
        if call == "twice":
            return own(model, inputs) / 4 + own(model, inputs) * 3 / 4
        if call == "logged first":
            with torch.no_grad():
                own(model, inputs)
        if call == "other rows":  # before TRL's own pass, and of another shape
            other = self._scored(model, other_rows(inputs))
            return own(model, inputs) - ALPHA * other.mean()
        loss: Tensor = own(model, inputs)
        if call == "scaled":
            return self.user["scale"] * loss
        if call == "nll":
            mask = inputs["completion_mask"]
            return loss - ALPHA * (self._scored(model, inputs) * mask).sum() / mask.sum().clamp(min=1)
        return loss

    def _scored(self, model: Any, inputs: Inputs) -> Tensor:
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        length = inputs["completion_ids"].size(1)
        logps: Tensor = self._get_per_token_logps_and_entropies(model, tokens, attention, length)[0]  # type: ignore[attr-defined]
        return logps


def halves(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Split a micro-batch in two."""
    rows = torch.arange(len(inputs["completion_ids"]))
    return taken(inputs, rows[: len(rows) // 2]), taken(inputs, rows[len(rows) // 2 :])


def other_rows(inputs: Inputs) -> Inputs:
    """Return one row more than a micro-batch has, three tokens longer, of other tokens."""
    rows, width = inputs["completion_ids"].shape
    rows, width = rows + 1, width + 3
    completions = 4 + torch.arange(rows * width).view(rows, width) % 11
    prompts = torch.full((rows, 4), 7)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
    }


# What the hand takes from the run.


@dataclass(frozen=True)
class Generated:
    """What our class returned of a generation, with the policy's weights then."""

    weights: dict[str, Tensor]
    batch: Inputs
    sampled: Counter[Any]
    supports: dict[RowKey, TokenSupport]


def supports_of(trainer: Any) -> dict[RowKey, TokenSupport]:
    """Return the sampling masks of the batch that was just generated, by row."""
    scoring = getattr(trainer.mm, "scoring", None)
    return {} if scoring is None else dict(scoring.tables.newest(training=True)[0].supports)


class Noting:
    """Notes what our class returns of each generation; stands right before our class among the bases."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = super()
        result = trainer._generate(*args, **kwargs)
        self.sampled += [(tuple(p), tuple(c)) for p, c in zip(result[0], result[1], strict=True)]  # type: ignore[attr-defined]
        return result

    def _generate_and_score_completions(self, inputs: Any) -> Inputs:
        trainer, run = super(), self
        begun = len(run.sampled)  # type: ignore[attr-defined]
        batch: Inputs = trainer._generate_and_score_completions(inputs)  # type: ignore[misc]
        sampled = Counter(run.sampled[begun:])  # type: ignore[attr-defined]
        made = Generated(weights_of(run.model), dict(batch), sampled, supports_of(run))  # type: ignore[attr-defined]
        run.generated.append(made)  # type: ignore[attr-defined]
        return batch


class Micro:
    """Notes the micro-batches; stands first."""

    def _prepare_inputs(self, inputs: Any) -> Inputs:
        trainer: Any = super()
        batch: Inputs = trainer._prepare_inputs(inputs)
        self.micro.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.items()})  # type: ignore[attr-defined]
        return batch


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters, float64."""
    return {name: one.detach().double() for name, one in model.named_parameters()}


class Steps(TrainerCallback):
    """Notes each optimizer step: its weights before and after, its micro-batches and their number."""

    trainer: Any

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin a step's micro-batches."""
        self.trainer.micro.clear()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note the weights."""
        self.before = weights_of(self.trainer.model)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note the step."""
        trainer = self.trainer
        accumulation = trainer.current_gradient_accumulation_steps
        step = {"before": self.before, "after": weights_of(trainer.model), "micro": list(trainer.micro)}
        self.steps.append({**step, "accumulation": accumulation})


# By hand.


def behavior_of(inputs: Inputs, logps: Tensor) -> Tensor:
    """Return the log-probabilities that a micro-batch was sampled with: the engine's, or the policy's at sampling time."""
    known = (inputs.get(name) for name in ("sampling_per_token_logps", "old_per_token_logps"))
    return next((one.double() for one in known if one is not None), logps.detach())


class Hand:
    """The steps of one run, by formula.

    Args:
        model: Path of the model, which is the reference too.
        case: Its settings.
        generated: What our class returned of each generation.
    """

    def __init__(self, model: str, case: dict[str, Any], generated: list[Generated]) -> None:
        self.generated = generated
        self.host, self.user, self.kl = case["host"], case["user"], case["block"].get("kl")
        given = {"dtype": torch.float64, "attn_implementation": "eager", **self.host.get("model_init_kwargs", {})}
        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(model, **given) for _ in range(2))
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.in_rewards = self.kl is not None and self.kl.get("reward_path") == "rewards"
        self.baselines: list[dict[Any, dict[int, float]]] = []  # by generation; a replayed row may have one in each
        self.taken = 0  # micro-batches
        for one in generated:
            self._of_batch(one)

    @torch.no_grad()
    def _of_batch(self, made: Generated) -> None:
        """Check a batch, and note its baselines."""
        batch, mask = made.batch, (made.batch["completion_mask"] * made.batch.get("tool_mask", 1)).bool()
        self.policy.load_state_dict(made.weights, strict=False)
        logps, reference = self.scores(self.policy, batch)[0], self.scores(self.reference, batch)[0]
        # A replayed row was scored before.
        pure = not self.user["ours_first"] or self.user["change"] not in ("replayed", "generated twice")
        for name, scores in (("old", logps), ("ref", reference)):
            theirs = batch.get(f"{name}_per_token_logps")
            if theirs is not None and pure:
                self.expect_near(name, theirs[mask], scores[mask])
        if not self.user["ours_first"] or self.user["change"] == "none":
            self.expect_near("advantages", batch["advantages"], self.advantages(batch))
        old = batch.get("old_per_token_logps")
        old = logps if old is None else old.double()
        self.baselines.append({})
        if self.kl is not None and self.kl["baseline"] == "leave_one_out" and self.kl["placement"] != "loss":
            steps = torch.where(mask, old - behavior_of(batch, old), 0.0).cumsum(1)
            values = self._estimate(old - reference) * (steps.exp() if self.kl["ratio"] == "sequence" else 1.0)
            self.baselines[-1] = self._baselines(batch, made.sampled, values, mask)

    def expect_near(self, name: str, found: Tensor, wanted: Tensor) -> None:
        """Check what a batch has."""
        off = (found - wanted).abs()
        assert not off.numel() or float(off.max()) < BOUNDS[name], (
            name,
            float(off.max()),
            self.host,
            self.user,
            self.kl,
        )

    def advantages(self, batch: Inputs) -> Tensor:
        """Return the advantages of a batch as it was generated `[B]`."""
        rows = zip(batch["completion_ids"], self._lengths(batch), strict=True)
        texts = [self.tokenizer.decode(row[:length], skip_special_tokens=True) for row, length in rows]
        rewards = torch.tensor([even(texts), parity(texts)], dtype=torch.float64).sum(0)
        if self.in_rewards:
            d = self.scores(self.policy, batch)[0] - self.scores(self.reference, batch)[0]
            rewards = rewards - self.kl["coef"] * (batch["completion_mask"] * self._estimate(d)).sum(1)
        groups = rewards.view(-1, self.host["num_generations"])
        centered = groups - groups.mean(1, keepdim=True)
        if self.host["scale_rewards"] == "group":
            centered = centered / (groups.std(1, keepdim=True) + 1e-4)
        return centered.flatten()

    def scores(self, model: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of completions `[B, T]`, and of the vocabulary `[B, T, V]`, of unpadded rows."""
        size, ids = model.config.vocab_size, inputs["completion_ids"]
        full = torch.full((*ids.shape, size), -math.log(size), dtype=torch.float64)
        lengths = torch.stack([inputs["prompt_mask"].sum(1), inputs["completion_mask"].sum(1)], 1).tolist()
        for before, count in {(before, count) for before, count in lengths if count}:
            rows = torch.tensor([row for row, found in enumerate(lengths) if found == [before, count]])
            prompts = inputs["prompt_ids"][rows][inputs["prompt_mask"][rows].bool()].view(len(rows), before)
            logits = model(input_ids=torch.cat([prompts, ids[rows, :count]], 1)).logits[:, before - 1 : -1]
            table = (logits / self.host["temperature"]).log_softmax(-1)
            full = full.index_put((rows[:, None], torch.arange(count)), table)
        return full.gather(-1, ids[..., None])[..., 0], full

    def _keys(self, batch: Inputs) -> list[Any]:
        return [
            (tuple(prompt[there.bool()].tolist()), tuple(completion[:count].tolist()))
            for prompt, there, completion, count in zip(
                batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"], self._lengths(batch), strict=True
            )
        ]

    def _lengths(self, batch: Inputs) -> list[int]:
        # Padding is the end token too, of which a completion has one at most: its mask may be all zeros.
        pad = self.policy.generation_config.pad_token_id
        return [
            int((row != pad).nonzero().max()) + 1 if bool((row != pad).any()) else 0 for row in batch["completion_ids"]
        ]

    def _baselines(
        self, batch: Inputs, sampled: Counter[Any], values: Tensor, mask: Tensor
    ) -> dict[Any, dict[int, float]]:
        """Return the mean of what the other samples of a prompt have from each position on, by prompt and completion."""
        later: dict[Any, list[list[float]]] = {}
        places: dict[Any, list[int]] = {}
        known = Counter({(p, tuple(self._without_pad(c))): n for (p, c), n in sampled.items()})
        for key, of_row, chosen in zip(self._keys(batch), values, mask, strict=True):
            rows, places[key] = later.setdefault(key, []), chosen.nonzero()[:, 0].tolist()
            if len(rows) < max(known[key], 1):  # further ones are copies
                own = of_row[chosen]
                rows.append((own.flip(0).cumsum(0).flip(0) if self.kl["target"] == "sequence" else own).tolist())
        result = {}
        for (prompt, completion), rows in later.items():
            others = [
                row for (p, c), more in later.items() if p == prompt for row in (more[1:] if c == completion else more)
            ]
            columns = [[row[at] for row in others if len(row) > at] for at in range(len(rows[0]))]
            means = [sum(column) / len(column) if column else 0.0 for column in columns]
            result[prompt, completion] = dict(zip(places[prompt, completion], means, strict=True))
        return result

    def _without_pad(self, completion: tuple[int, ...]) -> tuple[int, ...]:
        (length,) = self._lengths({"completion_ids": torch.tensor([completion])})
        return completion[:length]

    def _estimate(self, d: Tensor) -> Tensor:
        return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d, "abs": d.abs()}[self.kl["estimator"]]

    def kl_term(self, inputs: Inputs, logps: Tensor, mask: Tensor) -> Tensor:
        """Return the KL term of each token `[B, T]`."""
        kl = self.kl
        with torch.no_grad():
            reference = self.scores(self.reference, inputs)[0]
        behavior = behavior_of(inputs, logps)
        values = self._estimate(logps - reference)
        if self.in_rewards:
            return kl["coef"] * (values if kl["placement"] == "both" else torch.zeros_like(values))
        sequence = kl["ratio"] == "sequence"
        one, steps = torch.ones_like(values.detach()), torch.where(mask, logps.detach() - behavior, 0.0)
        ratio = {"none": one, "token": steps.exp(), "sequence": steps.cumsum(1).exp()}[kl["ratio"]]
        if kl["placement"] == "loss":
            return kl["coef"] * ratio * values
        seen = torch.where(mask, (ratio if sequence else one) * values.detach(), 0.0)
        credit = seen.flip(1).cumsum(1).flip(1) if kl["target"] == "sequence" else seen
        if kl["ratio"] == "token":
            credit = credit * ratio
        if kl["baseline"] == "leave_one_out":
            credit = credit - ratio * self._baseline(inputs, mask)
        own = ratio * (values if kl["placement"] == "both" else values.detach())
        return kl["coef"] * (own + credit * (logps - logps.detach()))

    def _baseline(self, inputs: Inputs, mask: Tensor) -> Tensor:
        """Return the baseline of each token `[B, T]`; each of the mask must have one."""
        found = torch.zeros(mask.shape, dtype=torch.float64)
        for row, key in enumerate(self._keys(inputs)):
            known = next(known[key] for known in reversed(self.baselines[: self.generations]) if key in known)
            for token in mask[row].nonzero()[:, 0].tolist():
                found[row, token] = known[token]
        return found

    @property
    def generations(self) -> int:
        """Number of generations until the present micro-batch."""
        twice = self.user["change"] == "generated twice" and not self.user["ours_first"]
        each = self.host["steps_per_generation"] * self.host["num_iterations"]
        return (1 + twice) * math.ceil(self.taken / each)

    def loss(self, inputs: Inputs, accumulation: int, *, own: bool, kl: bool) -> tuple[Tensor, Tensor]:
        """Return TRL's own loss on a micro-batch, the KL term in it or both, with the scores."""
        host, kind = self.host, self.host["loss_type"]
        logps = self.scores(self.policy, inputs)[0]
        chosen = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        mask, lengths = chosen.double(), chosen.sum(1, keepdim=True).clamp(min=1)
        term = self.policy_term(inputs, logps, mask, lengths) if own else torch.zeros_like(logps)
        if kl and self.kl is not None:
            term = term + self.kl_term(inputs, logps, chosen)
        total = (term * mask).sum()
        if kind in ("grpo", "sapo"):
            loss = ((term * mask).sum(1, keepdim=True) / lengths).mean() / accumulation
        elif kind == "bnpo":
            loss = total / mask.sum().clamp(min=1) / accumulation
        elif kind == "dr_grpo":
            loss = total / (len(mask) * host["max_completion_length"]) / accumulation
        elif kind == "luspo":
            loss = (term * mask).sum(1).mean() / accumulation
        else:
            items = inputs["num_items_in_batch"].double().clamp(min=1)
            loss = total / (items * accumulation / host["steps_per_generation"])
        return loss, logps

    def policy_term(self, inputs: Inputs, logps: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Return TRL's own term of each token `[B, T]`."""
        host, advantages = self.host, inputs["advantages"].double()
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]
        old = inputs.get("old_per_token_logps")
        old = logps.detach() if old is None else old.double()
        log_ratio = logps - old
        if host["importance_sampling_level"] == "sequence":
            log_ratio = (log_ratio * mask).sum(1, keepdim=True) / lengths
        ratio = log_ratio.exp()
        if host["loss_type"] == "cispo":
            return -ratio.clamp(max=host["epsilon_high"]).detach() * advantages * logps
        if host["loss_type"] == "sapo":
            heat = torch.where(advantages > 0, 1.0, 1.05).double()
            return -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantages
        if host["loss_type"] == "vespo":
            # phi(w) = e^l w^k e^(-l w) of the whole response's ratio w, where TRL's defaults are k=2, l=3, or 3 and 2 if A < 0.
            power, fall = (torch.where(advantages >= 0, *pair).double() for pair in ((2.0, 3.0), (3.0, 2.0)))
            log_weight = (log_ratio * mask).sum(1, keepdim=True).detach()
            weight = torch.exp(fall + power * log_weight - fall * log_weight.exp())
            return -weight * advantages * logps
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    def total(self, inputs: Inputs, accumulation: int) -> Tensor:
        """Return the user's loss: the block's terms stand outside of it where our class is first, and inside where it is last."""
        user, inside = self.user, not self.user["ours_first"]
        if user["call"] == "halves" and len(inputs["completion_ids"]) > 1:
            return sum(self.loss(part, accumulation, own=True, kl=inside)[0] for part in halves(inputs))  # type: ignore[return-value]
        loss, logps = self.loss(inputs, accumulation, own=True, kl=inside)
        if user["call"] == "scaled":
            loss = user["scale"] * loss
        elif user["call"] == "nll":
            mask = inputs["completion_mask"].double()
            loss = loss - ALPHA * (logps * mask).sum() / mask.sum().clamp(min=1)
        elif user["call"] == "other rows":
            loss = loss - ALPHA * self.scores(self.policy, other_rows(inputs))[0].mean()
        return loss if inside else loss + self.loss(inputs, accumulation, own=False, kl=True)[0]

    def expect_update(self, step: dict[str, Any], rate: float) -> None:
        """Check what the optimizer's step has added to the parameters."""
        self.policy.load_state_dict(step["before"], strict=False)
        self.policy.zero_grad()
        for inputs in step["micro"]:
            self.taken += 1
            loss = self.total(inputs, step["accumulation"])
            if loss.requires_grad:
                loss.backward()
        off, size = 0.0, 0.0
        for name, parameter in self.policy.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else -rate * parameter.grad
            found = step["after"][name] - step["before"][name]
            off += float(((found - wanted) ** 2).sum())
            size += float((wanted**2).sum())
        off, size = math.sqrt(off), math.sqrt(size)
        assert off < NEAR * size + ROUNDING, (off, size, self.host, self.user, self.kl)


def rate_of(step: int, block: dict[str, Any]) -> float:
    """Return the learning rate of a step."""
    halvings = step // block["lr"]["period"] if "lr" in block else 0
    return RATE * max(0.1, 0.5**halvings)


def built(model: str, out: str, case: dict[str, Any], **args: Any) -> tuple[Any, Steps]:
    """Return the trainer of one case, and what notes its steps."""
    inside = (Micro, Noting, MismatchTrainerMixin, User, GRPOTrainer)
    bases = inside if case["user"]["ours_first"] else (Micro, User, Noting, MismatchGRPOTrainer)
    rows = list({row["prompt"]: row for row in make_dataset(192, seed=5)}.values())[:64]
    given = {
        "output_dir": out, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_vllm": False,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, "use_cpu": True,
        "bf16": False, "disable_tqdm": True, "max_steps": STEPS, "gradient_checkpointing": False, **case["host"], **args,
    }  # fmt: skip
    noted = Steps()
    trainer: Any = type("Drawn", bases, {"user": case["user"]})(
        model=model, reward_funcs=[even, parity], args=MismatchGRPOConfig(**given, mismatch=case["block"]),
        train_dataset=Dataset.from_list(rows[:40]), callbacks=[noted],
    )  # fmt: skip
    moved(trainer, 0.02)
    noted.trainer, trainer.draws, trainer.more = trainer, torch.Generator().manual_seed(7), rows[40:]
    trainer.micro, trainer.generated, trainer.sampled = [], [], []
    return trainer, noted


def compare(model: str, out: str, case: dict[str, Any], by: type[Hand] = Hand, **args: Any) -> str | None:
    """Train one run, and check that each step is the hand's, or that it is refused as it has to be; return the refusal."""
    torch.set_num_threads(1)
    try:
        trainer, noted = built(model, out, case, **args)
        trainer.train()
    except MismatchError as error:
        assert case.get("refused", "no error") in str(error), (case, str(error))
        return f"{type(error).__name__}: {error}"
    assert "refused" not in case and len(noted.steps) == STEPS, case
    hand = by(model, case, trainer.generated)
    for number, step in enumerate(noted.steps):
        hand.expect_update(step, rate_of(number, case["block"]))
    return None


def compare_all(model: str, out: str, kind: str) -> None:
    """Compare the runs of all cases of a kind."""
    for number, case in enumerate(cases_of(kind)):
        compare(model, f"{out}/{number}", case)
