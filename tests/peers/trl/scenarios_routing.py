"""Runs of the real TRL with a `routing` section."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, MismatchTrainerMixin
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.rows import RowKey, rows_of_batch
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import RecordError, ReplayError, RoutingError
from mismatch_ext.log_reading import read_run
from mismatch_ext.routing import RoutingTrace
from tests.oracle import expect_float32, watch_float32_error
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


def routes_of(trainer: Any) -> dict[RowKey, RoutingTrace]:
    """Return the routes of the newest training batch, by row."""
    table = trainer.mm.scoring.tables.newest(training=True)[0]
    known: dict[RowKey, RoutingTrace] = table.routes
    return known


def mismatches(trainer: Any) -> list[float]:
    """Train, and return the share of tokens in each step for which the model would choose other experts."""
    trainer.train()
    return logged(trainer, ROUTING + "set_mismatch_frac")


# In these settings every update uses the weights that sampled, and in float32 the recorded experts are the model's own: replay
# must then change no bit.
UNMOVED: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "mask_truncated_completions": True},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"beta": 0.1, "router_aux_loss_coef": 0.01},
)


def transformers(model: str, out: str) -> None:
    """Train with transformers' generation, without routing and with R2."""
    for number, given in enumerate(UNMOVED):
        stock = build(model, f"{out}/{number}/stock", None, **given)
        stock.train()
        # Its constructor seeds the generators, so that both sample the same.
        r2 = build(model, f"{out}/{number}/r2", R2, **given)
        assert mismatches(r2) == logged(r2, ROUTING + "native_rows_frac") == [0.0] * 3, given
        assert digest_of(r2.model) == digest_of(stock.model) and logged(r2, "loss") == logged(stock, "loss"), given
        assert forwards(r2) >= 3
    # Once the policy has moved, its routes are not the reference's own.
    of_reference = build(model, f"{out}/reference", {**R2, "reference": True}, **given)
    assert mismatches(of_reference) == [0.0] * 3 and digest_of(of_reference.model) != digest_of(r2.model)
    # The second update of a batch keeps the routes that it was recorded with, where the model would choose others.
    stock = build(model, f"{out}/moved/stock", None, num_iterations=2, max_steps=4)
    stock.train()
    r2 = build(model, f"{out}/moved/r2", R2, num_iterations=2, max_steps=4)
    first, second, third, fourth = mismatches(r2)
    assert first == third == 0.0 and min(second, fourth) > 0.05
    assert digest_of(r2.model) != digest_of(stock.model)


def lora(model: str, out: str, mode: str) -> None:
    """Train adapters on attention and experts; with R3 also replay in the reference, which is the model without them."""
    vllm = {"use_vllm": True, "rest": {"precision": {"dtype": "float32"}}} if mode == "R3" else {}
    # With vLLM, TRL takes a pass for the old log-probabilities too.
    passes = {False: 6, True: 9} if mode == "R3" else {False: 3}
    digests = set()
    for reference, count in passes.items():
        trainer = build(
            model, f"{out}/{reference}", {"mode": mode, "measured": 1.0, "reference": reference}, beta=0.1, **vllm,
            peft_config=LoraConfig(
                r=4, target_modules=["q_proj"],
                target_parameters=["mlp.experts.gate_up_proj"], lora_dropout=0.0, init_lora_weights=False,
            ),
        )  # fmt: skip
        assert mismatches(trainer) == [0.0] * 3 and forwards(trainer) == count
        digests.add(digest_of(trainer.model))
    assert len(digests) == len(passes)


def evaluation(model: str, out: str) -> None:
    """Evaluate before and while training: replayed, and counted apart."""
    trainer = build(
        model, out, R2, eval_dataset=rows(2), per_device_eval_batch_size=8, eval_strategy="steps", eval_steps=1
    )
    trainer.evaluate()
    trainer.train()
    assert set(logged(trainer, f"eval_{ROUTING}set_mismatch_frac", "eval_loss")) == {0.0}
    evaluated = logged(trainer, f"eval_{ROUTING}compared_tokens", "eval_loss")
    trained = logged(trainer, f"{ROUTING}compared_tokens")
    assert len(evaluated) >= 3 and min(evaluated) > 50
    # A training step holds 8 completions of at most 16 tokens and their prompts, which no evaluation's tokens are added to.
    assert len(trained) == 3 and max(trained) < 8 * (16 + 12)
    for step in read_run(trainer.mm.log.run_dir).steps:
        if "eval/default" in step.split:
            assert {f"{ROUTING}layer_{layer}_set_mismatch" for layer in (0, 1)} <= step.metrics.keys()


def unknown_tokens(model: str, out: str) -> None:
    """Alter a prompt of a micro-batch."""
    trainer = build(model, out, R2, max_steps=1, max_completion_length=6)
    plain = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, **kwargs: Any) -> Any:
        inputs["prompt_ids"][3, -1] += 1
        return plain(model, inputs, **kwargs)

    trainer.compute_loss = compute_loss
    with pytest.raises(ReplayError, match="gives them tokens that neither of the last two steps has"):
        trainer.train()


class Extra(GRPOTrainer):  # type: ignore[misc]  # trl has no types
    """As objectives with corrupted prompts do: scores the micro-batch's rows again, and other rows of the same size."""

    moved: list[float]

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        tokens, mask, length = rows_of_batch(inputs)
        kept = inputs["completion_mask"].bool()

        def score(ids: Any, mask: Any) -> Any:
            with torch.no_grad():
                return self._get_per_token_logps_and_entropies(model, ids, mask, length, compute_entropy=True)[0]

        def native(ids: Any, mask: Any) -> Any:
            with overridden(self.mm.scoring, routing=None):
                return score(ids, mask)

        own, others, order = score(tokens, mask), tokens.clone(), torch.arange(len(tokens)).flip(0)
        others[:, :-length] = 9
        assert torch.equal(score(others, mask)[kept], native(others, mask)[kept])
        torch.testing.assert_close(score(tokens[order], mask[order])[kept[order]], own[order][kept[order]])
        torch.testing.assert_close(score(tokens[2:5], mask[2:5])[kept[2:5]], own[2:5][kept[2:5]])
        self.moved.append(float((own - native(tokens, mask))[kept].abs().max()))
        return loss


class ExtraWithReplay(MismatchTrainerMixin, Extra):
    """The same with a block."""


def other_tokens(model: str, out: str) -> None:
    """Train by a loss that scores other rows too, two updates per batch."""
    trainer = build(model, out, R2, kind=ExtraWithReplay, num_iterations=2, max_steps=2)
    trainer.moved = []
    trainer.train()
    # The second update's routes are those of the weights before: its passes tell which of them are replayed.
    first, second = trainer.moved
    assert first < 1e-5 and second > 1e-3
    assert logged(trainer, ROUTING + "other_passes") == [1.0, 1.0]


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


class Beside(Halves):
    """Gives TRL's loss the micro-batch, and trains on other prompts beside it."""

    def _of_trl(self, host: Any, model: Any, inputs: Any) -> Any:
        trainer: Any = self
        others = trainer._get_per_token_logps_and_entropies(model, *rows_of_batch(altered(inputs)))[0]
        return host._compute_loss(model, inputs) - others.mean()


def altered(inputs: Any) -> Any:
    return {**inputs, "prompt_ids": torch.full_like(inputs["prompt_ids"], 9)}


def own_pass(model: str, out: str) -> None:
    """Train by losses of TRL's beside a pass over the tokens that were sampled, inside of ours and outside of it."""
    with one_engine():
        for kind in (Halves, Altered, Beside):
            inside = type("Inside", (MismatchTrainerMixin, type("Users", (kind, GRPOTrainer), {})), {})
            outside = type("Outside", (kind, MismatchGRPOTrainer), {})
            for trainer_of in (inside, outside):
                trainer = build(
                    model, f"{out}/{kind.__name__} {trainer_of.__name__}", R3, kind=trainer_of, use_vllm=True,
                    rest={"precision": {"dtype": "float32"}}, max_steps=1,
                )  # fmt: skip
                if kind is Altered and trainer_of is outside:
                    words = "the loss was computed without a replayed forward pass over the micro-batch's tokens"
                    with pytest.raises(ReplayError, match=words):
                        trainer.train()
                    continue
                trainer.train()
                # In another order each row is under its routes. What a class trains on beside the rows of the micro-batch, all of
                # which were replayed, is counted.
                assert logged(trainer, ROUTING + "other_passes") == [0.0 if kind is Halves else 1.0], (kind, trainer_of)


def of_engine(model: str, out: str, dtype: str, **overrides: Any) -> Any:
    """Train on routes that vLLM recorded, scoring every batch without replay too; in float32 both sides agree."""
    block = {"precision": {"dtype": dtype}} if dtype == "float32" else {}
    trainer = build(model, out, R3, use_vllm=True, bf16=dtype != "float32", rest=block, **overrides)
    errors = watch_float32_error(trainer) if dtype == "float32" else []
    trainer.train()
    if errors:
        history = [entry for entry in trainer.state.log_history if "loss" in entry and "mismatch/k3_kl" in entry]
        expect_float32(history, errors)
    return trainer


def float32(model: str, out: str) -> None:
    """Engine and trainer route identically."""
    trainer = of_engine(model, out, "float32")
    assert logged(trainer, ROUTING + "set_mismatch_frac") == [0.0] * 3 and trainer.mm.checked.weight_version == 3
    tokens, native = (logged(trainer, f"mismatch/{name}") for name in ("tokens", "native/tokens"))
    assert tokens == native and min(tokens) > 50
    # Eight completions of two prompts: the prompts' routes are stored twice, not eight times.
    routes = list(routes_of(trainer).values())
    assert len({id(trace.parts[0]) for trace in routes}) == 2
    assert {version for trace in routes for version in trace.versions} == {(0, 3)}


def bfloat16(model: str, out: str) -> None:
    """Replay closes the gap on the same tokens: single ones on which experts differ carry k3, and a step has about a hundred."""
    trainer = of_engine(model, out, "bfloat16")
    assert min(logged(trainer, ROUTING + "set_mismatch_frac")) > 0
    for name, share in (("k3_kl", 0.7), ("logp_abs_diff_mean", 1.0)):
        replayed, native = (sum(logged(trainer, f"mismatch/{way}{name}")) for way in ("", "native/"))
        assert replayed < share * native, (name, replayed, native)


def iterations(model: str, out: str) -> None:
    """Take several updates of a batch in micro-batches, under checkpointing."""
    trainer = of_engine(
        model, out, "float32", num_iterations=2, gradient_accumulation_steps=2, per_device_train_batch_size=4,
        gradient_checkpointing=True, max_steps=4,
    )  # fmt: skip
    first, second, third, fourth = logged(trainer, ROUTING + "set_mismatch_frac")
    assert first == third == 0.0 < min(second, fourth)


def _swapped_layers(outputs: Any) -> None:
    for output in outputs:
        output.outputs[0].routed_experts = np.array(output.outputs[0].routed_experts)[:, ::-1].copy()


def _missing_row(outputs: Any) -> None:
    # The last completion: all before it are well-formed.
    completion = outputs[-1].outputs[0]
    completion.routed_experts = np.array(completion.routed_experts)[:-1]


def faults(model: str, out: str) -> None:
    """Corrupt what vLLM returns: a fault of one row is a bad row, and one of all rows is refused before there are gradients."""
    trainer = build(model, out, R3, use_vllm=True, rest={"precision": {"dtype": "float32"}}, max_steps=1)
    llm = trainer.vllm_generation.llm
    generate = llm.generate
    trainer.current_gradient_accumulation_steps = 1
    batch = next(iter(trainer.get_train_dataloader()))

    def attempt(corrupt: Callable[[Any], None]) -> list[str]:
        """Compute the loss of the batch, and return what was said of bad rows."""

        def corrupted(*args: Any, **kwargs: Any) -> Any:
            outputs = generate(*args, **kwargs)
            corrupt(outputs)
            return outputs

        llm.generate = corrupted
        trainer.mm.log._faults.clear()
        trainer.model.train()
        trainer._buffered_inputs, trainer._step = None, 0
        trainer.model.zero_grad()
        trainer.training_step(trainer.model, batch, None)
        return [fault.message for fault in trainer.mm.log._faults.get("train", [])]

    def has_gradients() -> bool:
        return any(p.grad is not None and bool(p.grad.any()) for p in trainer.model.parameters())

    # First, because a run compares the routes of its first replayed pass with the model's own.
    with pytest.raises(RoutingError, match=r"layer \d of the routing trace .* layers are swapped"):
        attempt(_swapped_layers)
    assert not has_gradients()
    (bad,) = attempt(_missing_row)
    assert re.search(r"routing has \d+ rows for \d+ tokens, 1 missing", bad) and has_gradients()
    plain = trainer.vllm_generation.generate

    def older(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        trainer.mm.checked.weight_version = 8
        return output

    with overridden(trainer.mm.checked, weight_version=7):
        trainer.vllm_generation.generate = older
        with pytest.raises(RecordError, match="rollouts of weight version 7, but the engine is at 8"):
            attempt(lambda outputs: None)
        trainer.vllm_generation.generate = plain
    assert not has_gradients()
    assert attempt(lambda outputs: None) == [] and has_gradients()  # the same batch, as the engine gave it
