"""Runs of the real TRL with a `routing` section."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.rows import RowKey, row_keys, rows_of_batch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import ReplayError
from mismatch_ext.log_reading import read_run
from mismatch_ext.routing import RoutingTrace
from tests.oracle import watch_float32_error
from tests.peers.trl.scenarios_by_hand import halves
from tests.peers.trl.scenarios_by_hand_engine import one_engine
from tests.peers.trl.scenarios_training import arguments, digest_of, forwards, graded, rows

R2, R3 = {"mode": "R2", "measured": 1.0}, {"mode": "R3", "measured": 1.0}
ROUTING = "mismatch/routing/"


def build(model: str, out: str, routing: Any, *, kind: Any = MismatchGRPOTrainer, **overrides: Any) -> Any:
    """Build a trainer; without a block it is TRL's own."""
    eager = {"experts_implementation": "eager"}  # grouped products do not come out the same in every process
    given = {"use_vllm": False, "bf16": False, "router_aux_loss_coef": 0.0, "model_init_kwargs": eager, **overrides}
    extra = {key: given.pop(key) for key in ("peft_config", "eval_dataset", "rest") if key in given}
    rest = extra.pop("rest", {})
    if routing is None:
        return GRPOTrainer(
            model=model, reward_funcs=graded, args=GRPOConfig(**arguments(out, **given)), train_dataset=rows(), **extra
        )
    block = {"routing": routing, **rest}
    config = MismatchGRPOConfig(**arguments(out, mismatch=block, **given))
    return kind(model=model, reward_funcs=graded, args=config, train_dataset=rows(), **extra)


def logged(trainer: Any, name: str, key: str = "loss") -> list[float]:
    """Return a metric of each training step that has it."""
    return [entry[name] for entry in trainer.state.log_history if key in entry and name in entry]


def outcome(trainer: Any) -> dict[str, Any]:
    """Train, and return what tests compare."""
    trainer.train()
    return {
        "parameters": digest_of(trainer.model),
        "losses": logged(trainer, "loss"),
        "mismatch": logged(trainer, ROUTING + "set_mismatch_frac"),
        "native_rows": logged(trainer, ROUTING + "native_rows_frac"),
        "forwards": forwards(trainer),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "aligned": {"gradient_accumulation_steps": 1},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "saved": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "steps": {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 4},
    "truncated": {"mask_truncated_completions": True},
    "reference": {"beta": 0.1},
    "auxiliary": {"router_aux_loss_coef": 0.01},
}
ROUTINGS: dict[str, Any] = {
    "stock": None,
    "R2": R2,
    "R2 reference": {**R2, "reference": True},
}


def transformers(model: str, out: str) -> dict[str, Any]:
    """Train with transformers' generation, in every setting, without routing and with R2."""
    result: dict[str, Any] = {}
    for name, given in SETTINGS.items():
        kinds = ["stock", "R2"] + (["R2 reference"] if name == "reference" else [])
        result[name] = {kind: outcome(build(model, f"{out}/{name}-{kind}", ROUTINGS[kind], **given)) for kind in kinds}
    return result


def lora(model: str, out: str, mode: str) -> dict[str, Any]:
    """Train adapters on attention and experts; with R3 also replay in the reference, which is the model without them."""
    result = {}
    vllm = {"use_vllm": True, "rest": {"precision": {"dtype": "float32"}}} if mode == "R3" else {}
    for reference in (False, True) if mode == "R3" else (False,):
        trainer = build(
            model, f"{out}/{reference}", {"mode": mode, "measured": 1.0, "reference": reference}, beta=0.1, **vllm,
            peft_config=LoraConfig(
                r=4, target_modules=["q_proj"],
                target_parameters=["mlp.experts.gate_up_proj"], lora_dropout=0.0, init_lora_weights=False,
            ),
        )  # fmt: skip
        result[f"reference {reference}"] = outcome(trainer)
    return result


def evaluation(model: str, out: str) -> dict[str, Any]:
    """Evaluate before, while and after training."""
    trainer = build(
        model, out, R2, eval_dataset=rows(2), per_device_eval_batch_size=8, eval_strategy="steps", eval_steps=1
    )
    trainer.evaluate()
    trainer.train()
    return {"mismatch": logged(trainer, f"eval_{ROUTING}set_mismatch_frac", "eval_loss"), **outcome_of_eval(trainer)}


def outcome_of_eval(trainer: Any) -> dict[str, Any]:
    """Return the tokens that were compared, of each evaluation and of each step."""
    name = ROUTING + "compared_tokens"
    layers = {
        split: sorted(
            m
            for r in read_run(trainer.mm.log.run_dir).steps
            if r.split == split
            for m in r.metrics
            if m.endswith("_set_mismatch")
        )
        for split in ("train", "eval/default")
    }
    return {
        "tokens": logged(trainer, f"eval_{name}", "eval_loss"),
        "train tokens": logged(trainer, name),
        "layers": {split: sorted(set(names)) for split, names in layers.items()},
        "logged": [name for entry in trainer.state.log_history for name in entry if "layer_1" in name],
    }


def failed_batch(model: str, out: str) -> dict[str, Any]:
    """Let a reward function fail once, then train on; and score tokens of one's own in between."""
    trainer = build(model, out, R3, use_vllm=True, rest={"precision": {"dtype": "float32"}}, max_steps=2)
    plain, result = trainer.reward_funcs, {}

    def failing(**_: Any) -> list[float]:
        raise KeyError("reward")

    trainer.reward_funcs = [failing]
    try:
        trainer.train()
    except KeyError:
        result["first"] = "KeyError"
    trainer.reward_funcs = plain
    trainer.train()
    tokens = torch.randint(3, 14, (8, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, torch.ones_like(tokens), 10)[0]
        with overridden(trainer.mm.scoring, routing=None):
            theirs = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, torch.ones_like(tokens), 10)[0]
    return {**result, "steps": trainer.state.global_step, "outside": float((ours - theirs).abs().max())}


def misplaced(model: str, out: str, kind: str) -> dict[str, Any]:
    """Change what a micro-batch's rows are found by: "routes" gives them those of others, "tokens" alters a prompt."""
    trainer = build(model, out, R2, max_steps=1, max_completion_length=6, per_device_train_batch_size=8)
    plain = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, **kwargs: Any) -> Any:
        if kind == "tokens":
            inputs["prompt_ids"][3, -1] += 1
        else:
            keys, known = row_keys(*rows_of_batch(inputs)), routes_of(trainer)
            own = [known[key] for key in keys]
            for key, one, other in zip(keys, own, own[::-1], strict=True):
                if one.rows == other.rows:
                    known[key] = replace(one, parts=other.parts)
        return plain(model, inputs, **kwargs)

    trainer.compute_loss = compute_loss
    return outcome(trainer)


def routes_of(trainer: Any) -> dict[RowKey, RoutingTrace]:
    """Return the routes of the newest training batch, by row."""
    table = trainer.mm.scoring.tables.newest(training=True)[0]
    known: dict[RowKey, RoutingTrace] = table.routes
    return known


class Extra(GRPOTrainer):  # type: ignore[misc]  # trl has no types
    """As objectives with corrupted prompts do: scores the micro-batch's rows again, and other rows of the same size."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        length, width = inputs["completion_ids"].size(1), inputs["prompt_ids"].size(1)
        kept = inputs["completion_mask"].bool()

        def score(ids: Any, mask: Any) -> Any:
            with torch.no_grad():
                return self._get_per_token_logps_and_entropies(model, ids, mask, length, compute_entropy=True)[0]

        def native(ids: Any, mask: Any) -> Any:
            with overridden(self.mm.scoring, routing=None):
                return score(ids, mask)

        own, plain = score(tokens, mask), native(tokens, mask)
        altered, holes, order = tokens.clone(), mask.clone(), torch.arange(len(tokens)).flip(0)
        altered[:, :width] = 9
        holes[:, width - 2] = 0
        widened = [torch.nn.functional.pad(each, (3, 0)) for each in (tokens, mask)]
        found = {
            "moved": (own - plain)[kept].abs().max(),
            "altered": (score(altered, mask) - native(altered, mask))[kept].abs().max(),
            "holes": (score(tokens, holes) - native(tokens, holes))[kept].abs().max(),
            "order": (score(tokens[order], mask[order]) - own[order])[kept[order]].abs().max(),
            "some": (score(tokens[2:5], mask[2:5]) - own[2:5])[kept[2:5]].abs().max(),
            "wider": (score(*widened) - own)[kept].abs().max(),
        }
        self.seen = [*getattr(self, "seen", []), {name: float(value) for name, value in found.items()}]
        return loss


class ExtraWithReplay(MismatchTrainerMixin, Extra):
    """The same with a block."""


def other_tokens(model: str, out: str) -> dict[str, Any]:
    """Train by a loss that scores other rows too, two updates per batch: the second's routes are not the model's own."""
    given = {"num_iterations": 2, "max_steps": 2}
    trainer = build(model, f"{out}/extra", R2, kind=ExtraWithReplay, **given)
    found = outcome(trainer)
    plain = build(model, f"{out}/plain", R2, **given)
    return {
        "seen": trainer.seen,
        "others": logged(trainer, ROUTING + "other_passes"),
        "parameters": [found["parameters"], digest_of_trained(plain)],
        "plain others": logged(plain, ROUTING + "other_passes"),
    }


class Halves:
    """As users write it: scores a micro-batch's rows for a term of its own, and gives TRL's loss halves of them."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        trainer: Any = self
        own = 0 * trainer._get_per_token_logps_and_entropies(model, *rows_of_batch(inputs))[0].sum()
        return self._of_trl(super(), model, inputs) + own

    def _of_trl(self, host: Any, model: Any, inputs: Any) -> Any:
        return sum(host._compute_loss(model, part) for part in reversed(halves(inputs))) / 2


class Altered(Halves):
    """Gives TRL's loss other prompts."""

    def _of_trl(self, host: Any, model: Any, inputs: Any) -> Any:
        return host._compute_loss(model, altered(inputs))


class Unbound(Halves):
    """Gives other prompts to TRL's loss, which it calls without our class."""

    def _of_trl(self, host: Any, model: Any, inputs: Any) -> Any:
        return GRPOTrainer._compute_loss(self, model, altered(inputs))


class Beside(Halves):
    """Gives TRL's loss the micro-batch, and trains on other prompts beside it."""

    def _of_trl(self, host: Any, model: Any, inputs: Any) -> Any:
        trainer: Any = self
        others = trainer._get_per_token_logps_and_entropies(model, *rows_of_batch(altered(inputs)))[0]
        return host._compute_loss(model, inputs) - others.mean()


def altered(inputs: Any) -> Any:
    return {**inputs, "prompt_ids": torch.full_like(inputs["prompt_ids"], 9)}


def own_pass(model: str, out: str) -> dict[str, str]:
    """Train by losses of TRL's beside a pass over the tokens that were sampled, inside of ours and outside of it.

    Returns:
        The passes that were not replayed, or what is refused, of each class.
    """
    found = {}
    with one_engine():
        for kind in (Halves, Altered, Unbound, Beside):
            inside = type("Inside", (MismatchTrainerMixin, type("Users", (kind, GRPOTrainer), {})), {})
            outside = type("Outside", (kind, MismatchGRPOTrainer), {})
            for name, trainer_of in ((f"{kind.__name__} inside", inside), (f"{kind.__name__} outside", outside)):
                trainer = build(
                    model, f"{out}/{name}", R3, kind=trainer_of, use_vllm=True,
                    rest={"precision": {"dtype": "float32"}}, max_steps=1,
                )  # fmt: skip
                try:
                    trainer.train()
                    found[name] = str(logged(trainer, ROUTING + "other_passes"))
                except ReplayError as error:
                    found[name] = str(error)
    return found


def digest_of_trained(trainer: Any) -> str:
    """Train, and return the digest of the parameters."""
    trainer.train()
    return digest_of(trainer.model)


def engine(model: str, out: str, dtype: str, **overrides: Any) -> dict[str, Any]:
    """Train on routes that vLLM recorded, scoring every batch without replay too."""
    block = {"precision": {"dtype": dtype}} if dtype == "float32" else {}
    trainer = build(model, out, R3, use_vllm=True, bf16=dtype != "float32", rest=block, **overrides)
    errors = watch_float32_error(trainer) if dtype == "float32" else []
    result = {**outcome(trainer), "float32_errors": errors}
    result["history"] = [entry for entry in trainer.state.log_history if "loss" in entry and "mismatch/k3_kl" in entry]
    for name in ("k3_kl", "logp_abs_diff_mean"):
        result[name], result[f"native/{name}"] = (logged(trainer, f"mismatch/{way}{name}") for way in ("", "native/"))
    for name in ("tokens", "native/tokens"):
        result[name] = logged(trainer, f"mismatch/{name}")
    result["weight_version"] = trainer.mm.checked.weight_version
    routes = routes_of(trainer).values()
    result["shared"] = [len({id(trace.parts[0]) for trace in routes})]
    result["versions"] = sorted({version for trace in routes for version in trace.versions})
    return result


def _of(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], None]:
    def corrupt(outputs: Any) -> None:
        # The last completion: all before it are well-formed.
        completion = outputs[-1].outputs[0]
        completion.routed_experts = change(np.array(completion.routed_experts))

    return corrupt


def _all(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], None]:
    def corrupt(outputs: Any) -> None:
        for output in outputs:
            output.outputs[0].routed_experts = change(np.array(output.outputs[0].routed_experts))

    return corrupt


def _duplicated(ids: np.ndarray) -> np.ndarray:
    ids[2, 1, 1] = ids[2, 1, 0]
    return ids


def _out_of_range(ids: np.ndarray) -> np.ndarray:
    ids[3, 0, 2] = 16
    return ids


def _absent(outputs: Any) -> None:
    outputs[-1].outputs[0].routed_experts = None


FAULTS: dict[str, Callable[[Any], None]] = {
    # First, because a run compares the routes of its first replayed pass with the model's own.
    "swapped layers": _all(lambda ids: ids[:, ::-1].copy()),
    "shifted rows": _all(lambda ids: np.roll(ids, 1, 0)),
    "missing row": _of(lambda ids: ids[:-1]),
    "extra row": _of(lambda ids: np.concatenate([ids, ids[-1:]])),
    "all zeros": _of(np.zeros_like),
    "duplicate ids": _of(_duplicated),
    "id out of range": _of(_out_of_range),
    "expert count": _of(lambda ids: ids[..., :-1]),
    "missing layer": _of(lambda ids: ids[:, :-1]),
    "no routing": _absent,
}


def faults(model: str, out: str) -> dict[str, Any]:
    """Corrupt what vLLM returns, one way after the other, and train a step on it."""
    trainer = build(model, out, R3, use_vllm=True, rest={"precision": {"dtype": "float32"}}, max_steps=1)
    llm, result = trainer.vllm_generation.llm, {}
    generate, before = llm.generate, digest_of(trainer.model)
    trainer.current_gradient_accumulation_steps = 1
    batches = iter(trainer.get_train_dataloader())
    batch = next(batches)

    def attempt() -> dict[str, Any]:
        trainer.model.train()
        trainer._buffered_inputs, trainer._step = None, 0
        found: dict[str, Any] = {"error": "", "message": "", "seconds": 0.0}
        try:
            trainer.training_step(trainer.model, batch, None)
        except Exception as error:  # noqa: BLE001 - what is raised is the result
            found = {"error": type(error).__name__, "message": str(error), "seconds": time.perf_counter() - returned[0]}
        found["bad"] = [fault.message for fault in trainer.mm.log._faults.pop("train", [])]
        found["gradients"] = any(p.grad is not None and bool(p.grad.any()) for p in trainer.model.parameters())
        trainer.model.zero_grad()
        return {**found, "moved": digest_of(trainer.model) != before}

    returned = [0.0]
    for name, corrupt in FAULTS.items():

        def corrupted(*args: Any, **kwargs: Any) -> Any:
            outputs = generate(*args, **kwargs)
            corrupt(outputs)  # noqa: B023
            returned[0] = time.perf_counter()
            return outputs

        llm.generate = corrupted
        result[name] = attempt()
    llm.generate = generate
    with overridden(trainer.mm.checked, weight_version=7):
        plain = trainer.vllm_generation.generate

        def older(*args: Any, **kwargs: Any) -> Any:
            output = plain(*args, **kwargs)
            trainer.mm.checked.weight_version = 8
            returned[0] = time.perf_counter()
            return output

        trainer.vllm_generation.generate = older
        result["policy version"] = attempt()
        trainer.vllm_generation.generate = plain
    result["none"] = attempt()
    return result


def measured(model: str, out: str, share: float) -> dict[str, Any]:
    """Train with and without measuring on the side."""
    routing = {"mode": "R3", "measured": share}
    return outcome(build(model, out, routing, use_vllm=True, rest={"precision": {"dtype": "float32"}}))
