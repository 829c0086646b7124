"""Trainings with drawn settings, under subclasses as users write them, and each of their steps by hand.

The hand's side is float64, row by row without padding, and uses nothing of the package: TRL's losses and the KL term by their
formulas, the optimizer, the schedule and the halved rate. What it takes from the run is the micro-batches and the weights before
each step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin
from mismatch_ext.adapters.trl.rows import RowKey
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.arithmetic.task import make_dataset
from mismatch_ext.errors import ConfigError, RecordError, ReplayError
from mismatch_ext.sampling_mask import TokenSupport
from tests.peers.trl.scenarios_kl import moved
from tests.peers.trl.scenarios_training import digest_of

Inputs = dict[str, Any]
RATE, ALPHA, ENTROPY, CLAMP, STEPS = 1e-2, 0.7, 0.05, 0.01, 3
ALARMS = {"alarms": {"reward": {"above": -10.0, "patience": 1, "action": "stop"}}}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
"""TRL's losses; `draw` chooses among all but the last."""
TIED = 1e-5
"""How far apart entropies of equal prefixes may be, nats: float32 rounds them by the row that they are in."""
ADAM_EPSILON = 1e-3
"""Large enough that the rounding of a gradient which is 0 by hand moves nothing."""
LORA: dict[str, Any] = {
    "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False
}  # fmt: skip


def even(completions: list[str], **_: Any) -> list[float]:
    """Reward the share of even digits, and length."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) + 0.01 * len(text) for text in completions]


def parity(completions: list[str], **_: Any) -> list[float]:
    """Reward an even length, and ones."""
    return [(-1.0) ** len(text) * (1 + text.count("1")) for text in completions]


def draw(seed: int) -> dict[str, Any]:
    """Draw arguments of TRL, a block, and what a user's subclass does."""
    rng = random.Random(seed)
    loss, group, accumulation = (
        rng.choice(["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"]),
        rng.choice([2, 4]),
        rng.choice([1, 1, 2, 3]),
    )
    host: dict[str, Any] = {
        "loss_type": loss,
        "num_generations": group,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": rng.choice([accumulation, 1, 2, 4]),
        "per_device_train_batch_size": rng.choice([2, 4, 8] if group == 2 else [4, 8]),
        "importance_sampling_level": rng.choice(["token", "token", "sequence"]),
        "num_iterations": rng.choice([1, 1, 2, 3]),
        "temperature": rng.choice([1.0, 0.7, 1.3]),
        "mask_truncated_completions": rng.random() < 0.25,
        "scale_rewards": rng.choice(["group", "batch", "none"]),
        "max_completion_length": rng.choice([6, 10]),
        "seed": rng.randrange(1000),
        "gradient_checkpointing": rng.random() < 0.2,
        "max_grad_norm": rng.choice([0.0, 0.0, 0.05]),
        "optim": rng.choice(["sgd", "sgd", "adamw_torch"]),
        "lr_scheduler_type": rng.choice(["constant", "linear", "cosine", "constant_with_warmup"]),
        "warmup_steps": rng.choice([0, 1]),
        "adam_epsilon": ADAM_EPSILON,
    }
    if rng.random() < 0.2:
        host["delta"] = 1.5
    if loss == "cispo":
        host["epsilon_high"] = 5.0
    if rng.random() < 0.15:
        host["off_policy_mask_threshold"] = 0.02
    if rng.random() < 0.15:
        host["entropy_coef"] = ENTROPY
    if rng.random() < 0.15:
        host["top_entropy_quantile"] = 0.5
    block: dict[str, Any] = {}
    if rng.random() < 0.85:
        block["kl"] = {
            "estimator": rng.choice(["k1", "k2", "k3", "abs", "k1"]),
            "placement": rng.choice(["reward", "both", "loss"]),
            "target": rng.choice(["token", "sequence"]),
            "ratio": rng.choice(["none", "token", "sequence"]),
            "baseline": rng.choice(["none", "leave_one_out", "leave_one_out"]),
            "coef": rng.choice([0.05, 0.5]),
        }
        if rng.random() < 0.3:
            host["beta"] = block["kl"].pop("coef")  # the host's own name for it
    if rng.random() < 0.5 or not block:
        block["lr"] = {"period": rng.choice([1, 2])}
    changes = ["none", "none", "permuted", "group dropped", "row dropped", "refilled", "best twice", "advantages scaled",
               "advantages by token", "tool mask", "replayed", "generated twice"]  # fmt: skip
    user = {
        "change": rng.choice(changes),
        "call": rng.choice(["none", "none", "scaled", "clamped", "nll", "halves", "entropy"]),
        "scale": rng.choice([0.5, 2.0, -1.0]),
        "ours_first": rng.random() < 0.5,
    }
    if loss == "luspo" and user["change"] == "advantages by token":
        user["change"] = "none"
    if rng.random() < 0.2:
        host["reward_weights"] = [0.3, 1.7]
    if rng.random() < 0.15:
        host |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    lora = rng.random() < 0.15
    if (kl := block.get("kl")) is not None:
        if rng.random() < 0.25:
            kl["target_kl"] = rng.choice([0.05, 0.5])
        if rng.random() < 0.3 and kl["placement"] != "loss":
            kl |= {"reward_path": "rewards", "target": "sequence", "ratio": "none", "baseline": "none"}
            host["mask_truncated_completions"] = False
        if rng.random() < 0.15 and not lora:
            host |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    return {"host": host, "block": block, "user": user, "lora": lora}


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
        if not self.model.training:  # type: ignore[attr-defined]
            return batch
        changed = self.changed(batch)
        least = self.args.steps_per_generation  # type: ignore[attr-defined]  # TRL has no micro-batch without rows
        return changed if len(changed["completion_ids"]) >= least else batch

    def changed(self, batch: Inputs) -> Inputs:
        """Return the batch as this user wants it."""
        change, rows, group = self.user["change"], len(batch["completion_ids"]), self.num_generations  # type: ignore[attr-defined]
        groups = rows // group
        if change == "permuted":
            return taken(batch, torch.randperm(rows, generator=self.draws))
        if change == "group dropped":
            return taken(batch, torch.arange(rows)[group:])
        if change == "row dropped":
            return taken(batch, torch.tensor([row for row in range(rows) if row % group]))
        if change == "refilled":
            kept = [1, *range(1, groups)] if groups > 1 else [0]
            return taken(batch, torch.tensor([number * group + row for number in kept for row in range(group)]))
        if change == "best twice":
            best = batch["advantages"].abs().argsort(descending=True)
            return taken(batch, torch.cat([best[: rows // 2], best[: rows - rows // 2]]))
        if change == "advantages scaled":
            return batch | {"advantages": batch["advantages"] * 0.5 + 0.1}
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
            other = other_rows(inputs)
            tokens = torch.cat([other["prompt_ids"], other["completion_ids"]], 1)
            width = other["completion_ids"].size(1)
            logps = self._get_per_token_logps_and_entropies(model, tokens, torch.ones_like(tokens), width)[0]  # type: ignore[attr-defined]
            return own(model, inputs) - ALPHA * logps.mean()
        loss: Tensor = own(model, inputs)
        if call == "scaled":
            return self.user["scale"] * loss
        if call == "clamped":
            return loss.clamp(-CLAMP, CLAMP)
        mask = inputs["completion_mask"]
        if call == "nll":
            tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            attention = torch.cat([inputs["prompt_mask"], mask], 1)
            logps = self._get_per_token_logps_and_entropies(model, tokens, attention, mask.size(1))[0]  # type: ignore[attr-defined]
            return loss - ALPHA * (logps * mask).sum() / mask.sum().clamp(min=1)
        if call == "entropy":
            tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            attention = torch.cat([inputs["prompt_mask"], mask], 1)
            logits = model(input_ids=tokens, attention_mask=attention).logits[:, -mask.size(1) - 1 : -1]
            table = (logits.float() / self.temperature).log_softmax(-1)  # type: ignore[attr-defined]
            return loss - ALPHA * (-(table.exp() * table).sum(-1) * mask).sum() / mask.sum().clamp(min=1)
        return loss


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
    """What our class returned of a generation, with the weights of policy and reference then."""

    step: int
    weights: dict[str, Tensor]
    reference: dict[str, Tensor]
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
        if run.model.training:  # type: ignore[attr-defined]
            run.generated.append(  # type: ignore[attr-defined]
                Generated(
                    run.state.global_step,  # type: ignore[attr-defined]
                    weights_of(run.model),  # type: ignore[attr-defined]
                    weights_of(run.ref_model),  # type: ignore[attr-defined]
                    dict(batch),
                    Counter(run.sampled[begun:]),  # type: ignore[attr-defined]
                    supports_of(run),
                )
            )
        return batch


class Micro:
    """Notes the micro-batches; stands first."""

    def _prepare_inputs(self, inputs: Any) -> Inputs:
        trainer: Any = super()
        batch: Inputs = trainer._prepare_inputs(inputs)
        if self.model.training:  # type: ignore[attr-defined]
            self.micro.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.items()})  # type: ignore[attr-defined]
        return batch


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters, float64."""
    return {} if model is None else {name: one.detach().double() for name, one in model.named_parameters()}


class Steps(TrainerCallback):
    """Notes each optimizer step: its weights before and after, its micro-batches and their number."""

    trainer: Any

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin a step's micro-batches."""
        self.trainer.micro.clear()
        self.reference = weights_of(self.trainer.ref_model)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note the weights."""
        self.before = weights_of(self.trainer.model)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note the step."""
        trainer = self.trainer
        self.steps.append({
            "before": self.before, "after": weights_of(trainer.model), "micro": list(trainer.micro),
            "accumulation": trainer.current_gradient_accumulation_steps, "reference": self.reference,
        })  # fmt: skip


# By hand.


def behavior_of(inputs: Inputs, logps: Tensor) -> Tensor:
    """Return the log-probabilities that a micro-batch was sampled with: the engine's, or the policy's at sampling time."""
    known = (inputs.get(name) for name in ("sampling_per_token_logps", "old_per_token_logps"))
    return next((one.double() for one in known if one is not None), logps.detach())


class Hand:
    """The steps of one drawn run, by formula.

    Args:
        model: Path of the model, which is the reference too.
        case: What was drawn.
        generated: What our class returned of each generation.

    Attributes:
        batch_errors: Largest difference of what was made with a batch from the same by hand, by what it is.
        tied: Whether several tokens lie at the threshold of TRL's entropy quantile, as first tokens of one prompt do. Rounding
            tells which of them TRL keeps.
    """

    def __init__(self, model: str, case: dict[str, Any], generated: list[Generated]) -> None:
        self.generated = generated
        self.host, self.user, self.kl = case["host"], case["user"], case["block"].get("kl")
        self.lora = case["lora"]
        self.policy, self.reference = (
            AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.float64, attn_implementation="eager", **self.host.get("model_init_kwargs", {})
            )
            for _ in range(2)
        )
        if self.lora:
            self.policy = get_peft_model(self.policy, LoraConfig(**LORA)).double()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.in_rewards = self.kl is not None and self.kl.get("reward_path") == "rewards"
        self.baselines: list[dict[Any, dict[int, float]]] = []  # by generation; a replayed row may have one in each
        self.taken = 0  # micro-batches
        self.tied = False
        self.coefs: list[float] = []  # by generation
        self.batch_errors = {"old": 0.0, "ref": 0.0, "advantages": 0.0}
        coef, integral = 0.0 if self.kl is None else self.host.get("beta") or self.kl["coef"], 0.0
        initial = coef
        for _, of_step in itertools.groupby(generated, lambda one: one.step):
            self.coef = coef
            measured = [self._of_batch(one) for one in of_step]
            self.coefs += [coef] * len(measured)
            tokens = sum(len(d) for d in measured)
            if self.kl is not None and "target_kl" in self.kl and tokens:
                mean = float(sum(d.sum() for d in measured)) / tokens
                error = max(-0.2, min(0.2, mean / self.kl["target_kl"] - 1))
                integral += 0.05 * error
                coef = initial * math.exp(integral + 0.1 * error)

    @torch.no_grad()
    def _of_batch(self, made: Generated) -> Tensor:
        """Check a batch, note its baselines, and return log pi - log pi_ref of its tokens."""
        batch, mask = made.batch, (made.batch["completion_mask"] * made.batch.get("tool_mask", 1)).bool()
        self.policy.load_state_dict(made.weights, strict=False)
        if not self.lora:
            self.reference.load_state_dict(made.reference, strict=False)
        logps, reference = self.scores(self.policy, batch)[0], self.scores(self.reference, batch)[0]
        # A replayed row was scored before.
        pure = not self.user["ours_first"] or self.user["change"] not in ("replayed", "generated twice")
        for name, scores in (("old", logps), ("ref", reference)):
            theirs = batch.get(f"{name}_per_token_logps")
            if theirs is not None and pure and mask.any():
                self.differs(name, (theirs - scores)[mask])
        if not self.user["ours_first"] or self.user["change"] == "none":
            self.differs("advantages", self.advantages(batch) - batch["advantages"])
        old = batch.get("old_per_token_logps")
        old = logps if old is None else old.double()
        self.baselines.append({})
        if self.kl is None:
            return old[mask]
        if self.kl["baseline"] == "leave_one_out" and self.kl["placement"] != "loss":
            steps = torch.where(mask, old - behavior_of(batch, old), 0.0).cumsum(1)
            values = self._estimate(old - reference) * (steps.exp() if self.kl["ratio"] == "sequence" else 1.0)
            self.baselines[-1] = self._baselines(batch, made.sampled, values, mask)
        return (old - reference)[mask]

    def differs(self, name: str, difference: Tensor) -> None:
        """Note how far something is from the same by hand."""
        self.batch_errors[name] = max(self.batch_errors.get(name, 0.0), float(difference.abs().max()))

    def advantages(self, batch: Inputs) -> Tensor:
        """Return the advantages of a batch as it was generated `[B]`."""
        lengths = self._lengths(batch)
        texts = [
            self.tokenizer.decode(row[:length], skip_special_tokens=True)
            for row, length in zip(batch["completion_ids"], lengths, strict=True)
        ]
        of_functions = torch.tensor([even(texts), parity(texts)], dtype=torch.float64)
        rewards = torch.tensor(self.host.get("reward_weights", [1.0, 1.0]), dtype=torch.float64) @ of_functions
        if self.in_rewards:
            d = self.scores(self.policy, batch)[0] - self.scores(self.reference, batch)[0]
            rewards = rewards - self.coef * (batch["completion_mask"] * self._estimate(d)).sum(1)
        groups = rewards.view(-1, self.host["num_generations"])
        centered = groups - groups.mean(1, keepdim=True)
        if self.host["scale_rewards"] == "group":
            centered = centered / (groups.std(1, keepdim=True) + 1e-4)
        elif self.host["scale_rewards"] == "batch":
            centered = centered / (rewards.std() + 1e-4)
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
        if "sync_ref_model" in self.host:  # what it was at sampling time has been compared
            reference = inputs["ref_per_token_logps"].double()
        behavior = behavior_of(inputs, logps)
        values = self._estimate(logps - reference)
        if self.in_rewards:
            return self.coef * (values if kl["placement"] == "both" else torch.zeros_like(values))
        sequence = kl["ratio"] == "sequence"
        one, steps = torch.ones_like(values.detach()), torch.where(mask, logps.detach() - behavior, 0.0)
        ratio = {"none": one, "token": steps.exp(), "sequence": steps.cumsum(1).exp()}[kl["ratio"]]
        if kl["placement"] == "loss":
            return self.coef * ratio * values
        seen = torch.where(mask, (ratio if sequence else one) * values.detach(), 0.0)
        credit = seen.flip(1).cumsum(1).flip(1) if kl["target"] == "sequence" else seen
        if kl["ratio"] == "token":
            credit = credit * ratio
        if kl["baseline"] == "leave_one_out":
            credit = credit - ratio * self._baseline(inputs, mask)
        own = ratio * (values if kl["placement"] == "both" else values.detach())
        return self.coef * (own + credit * (logps - logps.detach()))

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

    def loss(self, inputs: Inputs, accumulation: int, *, own: bool, kl: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return TRL's own loss on a micro-batch, the KL term in it or both, with the scores."""
        host = self.host
        logps, full = self.scores(self.policy, inputs)
        chosen = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        mask, lengths = chosen.double(), chosen.sum(1, keepdim=True).clamp(min=1)
        entropy = -(full.exp() * full).sum(-1)
        term, kept = torch.zeros_like(logps), mask
        if own:
            term, kept = self.policy_term(inputs, logps, mask, lengths, entropy)
        if kl and self.kl is not None:
            term = term + self.kl_term(inputs, logps, chosen)
        total, kind = (term * mask).sum(), host["loss_type"]
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
        if own and host.get("entropy_coef"):
            loss = loss - ENTROPY * (entropy * kept).sum() / kept.sum().clamp(min=1) / accumulation
        return loss, logps, entropy

    def policy_term(
        self, inputs: Inputs, logps: Tensor, mask: Tensor, lengths: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return TRL's own term of each token `[B, T]`, and which tokens its entropy quantile keeps."""
        host, advantages = self.host, inputs["advantages"].double()
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]
        old = inputs.get("old_per_token_logps")
        old = logps.detach() if old is None else old.double()
        log_ratio = logps - old
        if host["importance_sampling_level"] == "sequence":
            log_ratio = (log_ratio * mask).sum(1, keepdim=True) / lengths
        ratio, high = log_ratio.exp(), host.get("epsilon_high", 0.2)
        if host["loss_type"] == "cispo":
            term = -ratio.clamp(max=high).detach() * advantages * logps
        elif host["loss_type"] == "sapo":
            heat = torch.where(advantages > 0, 1.0, 1.05).double()
            term = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantages
        elif host["loss_type"] == "vespo":
            # phi(w) = e^l w^k e^(-l w) of the whole response's ratio w, where TRL's defaults are k=2, l=3, or 3 and 2 if A < 0.
            power, fall = (torch.where(advantages >= 0, *pair).double() for pair in ((2.0, 3.0), (3.0, 2.0)))
            log_weight = (log_ratio * mask).sum(1, keepdim=True).detach()
            weight = torch.exp(fall + power * log_weight - fall * log_weight.exp())
            term = -weight * advantages * logps
        else:
            bounded = ratio.clamp(max=host["delta"]) if "delta" in host else ratio
            term = -torch.min(bounded * advantages, ratio.clamp(0.8, 1 + high) * advantages)
        term, kept = term + torch.zeros_like(logps), mask
        if "off_policy_mask_threshold" in host:
            moved_by = ((behavior_of(inputs, logps) - logps.detach()) * mask).sum(1, keepdim=True) / lengths
            term = term * ((advantages >= 0) | (moved_by <= host["off_policy_mask_threshold"])).double()
        if "top_entropy_quantile" in host:
            values = entropy.detach().float()
            there = values[mask.bool()]
            least = torch.quantile(there, 0.5) if len(there) else torch.tensor(0.0)
            self.tied |= int(((there - least).abs() < TIED).sum()) > 1
            kept = ((values * mask.float()) >= least).double() * mask
            term = term * kept
        return term, kept

    def total(self, inputs: Inputs, accumulation: int) -> Tensor:
        """Return the user's loss: the block's terms stand outside of it where our class is first, and inside where it is last."""
        user, inside = self.user, not self.user["ours_first"]
        if user["call"] == "halves" and len(inputs["completion_ids"]) > 1:
            return sum(self.loss(part, accumulation, own=True, kl=inside)[0] for part in halves(inputs))  # type: ignore[return-value]
        loss, logps, entropy = self.loss(inputs, accumulation, own=True, kl=inside)
        mask = inputs["completion_mask"].double()
        if user["call"] == "scaled":
            loss = user["scale"] * loss
        elif user["call"] == "clamped":
            loss = loss.clamp(-CLAMP, CLAMP)
        elif user["call"] in ("nll", "entropy"):
            scores = logps if user["call"] == "nll" else entropy
            loss = loss - ALPHA * (scores * mask).sum() / mask.sum().clamp(min=1)
        elif user["call"] == "other rows":
            loss = loss - ALPHA * self.scores(self.policy, other_rows(inputs))[0].mean()
        return loss if inside else loss + self.loss(inputs, accumulation, own=False, kl=True)[0]

    def rate(self, step: int, block: dict[str, Any]) -> float:
        """Return the learning rate of a step."""
        kind = self.host["lr_scheduler_type"]
        warm = 0 if kind == "constant" else self.host["warmup_steps"]
        part = (step - warm) / max(1, STEPS - warm)
        if kind == "constant":
            scheduled = 1.0
        elif step < warm:
            scheduled = step / max(1, warm)
        else:
            scheduled = {
                "constant_with_warmup": 1.0,
                "linear": max(0.0, 1 - part),
                "cosine": 0.5 * (1 + math.cos(math.pi * part)),
            }[kind]
        halved = max(0.1, 0.5 ** (max(step - warm, 0) // block["lr"]["period"])) if "lr" in block else 1.0
        return RATE * scheduled * halved

    def updates(self, step: dict[str, Any], rate: float, number: int, moments: dict[str, Any]) -> dict[str, Tensor]:
        """Return what the optimizer's step adds to each parameter."""
        self.policy.load_state_dict(step["before"], strict=False)
        if not self.lora:
            self.reference.load_state_dict(step["reference"], strict=False)
        self.policy.zero_grad()
        for inputs in step["micro"]:
            self.taken += 1
            self.coef = self.coefs[self.generations - 1]
            loss = self.total(inputs, step["accumulation"])
            if loss.requires_grad:
                loss.backward()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.policy.named_parameters()
        }
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        limit = self.host["max_grad_norm"]
        result = {}
        for name, gradient in gradients.items():
            gradient = gradient * (min(1.0, limit / (norm + 1e-6)) if limit else 1.0)
            if self.host["optim"] != "sgd":
                first, second = moments.get(name, (0.0, 0.0))
                first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient * gradient
                moments[name] = first, second
                size = (second / (1 - 0.999 ** (number + 1))).sqrt() + ADAM_EPSILON
                gradient = first / (1 - 0.9 ** (number + 1)) / size
            result[name] = -rate * gradient
        return result


def built(
    model: str, out: str, case: dict[str, Any], bases: tuple[Any, ...], args: dict[str, Any]
) -> tuple[Any, Steps]:
    """Return the trainer of one case, of these bases, and what notes its steps."""
    rows = list({row["prompt"]: row for row in make_dataset(192, seed=5)}.values())[:64]
    config = MismatchGRPOConfig if "mismatch" in args else GRPOConfig
    given = {
        "output_dir": out, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_vllm": False,
        "learning_rate": RATE, "use_cpu": True, "bf16": False, "disable_tqdm": True, "max_steps": STEPS, **case["host"], **args,
    }  # fmt: skip
    noted = Steps()
    trainer: Any = type("Drawn", bases, {"user": case["user"]})(
        model=model, reward_funcs=[even, parity], args=config(**given),
        train_dataset=Dataset.from_list(rows[:40]), eval_dataset=Dataset.from_list(rows[:4]), callbacks=[noted],
        peft_config=LoraConfig(**LORA) if case["lora"] else None,
    )  # fmt: skip
    moved(trainer, 0.02)
    noted.trainer, trainer.draws, trainer.more = trainer, torch.Generator().manual_seed(7), rows[40:]
    trainer.micro, trainer.generated, trainer.sampled = [], [], []
    return trainer, noted


def compared(model: str, out: str, case: dict[str, Any], by: type[Hand] = Hand, **args: Any) -> dict[str, Any]:
    """Train one run; return how far each step is from the hand's, and how long that is, or a refusal."""
    base = (Micro, Noting, MismatchTrainerMixin, User, GRPOTrainer)
    bases = base if case["user"]["ours_first"] else (Micro, User, Noting, MismatchGRPOTrainer)
    result: dict[str, Any] = {"case": case}
    try:
        trainer, noted = built(model, out, case, bases, {**args, "mismatch": case["block"]})
        trainer.train()
    except (ConfigError, RecordError, ReplayError) as error:
        return result | {"refused": str(error)}
    hand, moments, errors = by(model, case, trainer.generated), {}, []
    for number, step in enumerate(noted.steps):
        wanted = hand.updates(step, hand.rate(number, case["block"]), number, moments)
        size = math.sqrt(sum(float((update**2).sum()) for update in wanted.values()))
        found = {name: step["after"][name] - step["before"][name] for name in wanted}
        off = math.sqrt(sum(float(((found[name] - wanted[name]) ** 2).sum()) for name in wanted))
        errors.append((off, size))
    return result | {"errors": errors, "batch_errors": hand.batch_errors, "tied": hand.tied}


def drawn(model: str, out: str, first: int, last: int) -> list[dict[str, Any]]:
    """Compare the runs of some seeds."""
    torch.set_num_threads(1)
    return [{"seed": seed, **compared(model, f"{out}/{seed}", draw(seed))} for seed in range(first, last)]


def given(model: str, out: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the runs of some cases."""
    torch.set_num_threads(1)
    return [compared(model, f"{out}/{number}", case) for number, case in enumerate(cases)]


def each_loss(model: str, out: str) -> list[dict[str, Any]]:
    """Compare runs of each loss with a KL in it and two micro-batches a step, under calls that `draw` does not draw."""
    calls = ("none", "twice", "logged first", "other rows")
    return given(model, out, [case_of(loss, calls[at % 4], at % 3 == 0) for at, loss in enumerate(LOSSES)])


def case_of(loss: str, call: str, ours_first: bool) -> dict[str, Any]:
    """Return a case of a loss whose batches are learned from twice, so that ratios are not 1."""
    host = {
        "loss_type": loss, "num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "steps_per_generation": 2, "num_iterations": 2, "importance_sampling_level": "token", "temperature": 1.0,
        "scale_rewards": "group", "max_completion_length": 6, "max_grad_norm": 0.0, "optim": "sgd",
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    if loss == "cispo":
        host["epsilon_high"] = 5.0
    term = {"estimator": "k3", "placement": "loss", "target": "token", "ratio": "none", "baseline": "none"}
    block: dict[str, Any] = {"lr": {"period": 2}, "kl": {**term, "coef": 0.5}}
    user = {"change": "none", "call": call, "scale": 1.0, "ours_first": ours_first}
    return {"host": host, "block": block, "user": user, "lora": False}


def measured(model: str, out: str, first: int, last: int) -> list[dict[str, Any]]:
    """Train the runs of some seeds twice, without a block and with one whose sections are left out, so that alarms remain."""
    torch.set_num_threads(1)
    found = []
    for seed in range(first, last):
        case = draw(seed)
        if "beta" not in case["host"]:  # the block's coefficient, which stock TRL does not read
            case["host"].pop("sync_ref_model", None)
        bases = (MismatchTrainerMixin, User, GRPOTrainer) if case["user"]["ours_first"] else (User, MismatchGRPOTrainer)
        result: dict[str, Any] = {"case": case}
        for name, of_kind, args in (
            ("stock", (User, GRPOTrainer), {}),
            ("measured", bases, {"mismatch": {"level": "observe", **case["block"], "monitor": ALARMS}}),
        ):
            trainer, _ = built(model, f"{out}/{seed}-{name}", case, of_kind, args)
            trainer.train()
            result[name] = {
                "parameters": digest_of(trainer.model),
                "random": torch.get_rng_state().sum().item(),
                "logged": [
                    {key: str(value) for key, value in entry.items() if not key.startswith(("mismatch/", "eval_mismatch/"))
                     and not key.endswith(("time", "per_second"))}
                    for entry in trainer.state.log_history
                ],
            }  # fmt: skip
        found.append(result)
    return found
