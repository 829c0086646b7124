"""Gradients of the actor's loss through verl's FSDP2 engine, against exact ones, plain formulas and verl's own terms."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.verl.loss import COEF, make_loss
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from examples.arithmetic.tokenizer import make_tokenizer
from tests.peers.forks import on_ranks
from tests.peers.verl.in_process.losses import (
    END,
    PROMPT,
    actor_config,
    batch_of,
    block_of,
    flat,
    relative,
)
from tests.peers.verl.in_process.routes import refused
from tests.peers.verl.in_process.workers import update, worker

VOCABULARY, HORIZON = 4, 3
K3 = {"estimator": "k3", "placement": "loss", "target": "token"}
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def build_policy(directory: Path) -> str:
    """Save a Qwen3 with a vocabulary that can be enumerated."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = directory / "policy"
    Qwen3ForCausalLM(config).save_pretrained(policy)
    make_tokenizer().save_pretrained(policy)
    return str(policy)


def plain_logps(path: str, responses: list[Tensor]) -> list[Tensor]:
    """Return the log-probability of each token from a plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    rows = [torch.cat([torch.tensor(PROMPT), r]) for r in responses]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        logps = model(input_ids=tokens).logits.double().log_softmax(-1)
    whole = [logps[i, len(PROMPT) - 1 : len(PROMPT) - 1 + len(r)] for i, r in enumerate(responses)]
    return [w.gather(-1, r[:, None])[:, 0] for w, r in zip(whole, responses, strict=True)]


class Engine:
    """verl's TrainingWorker with its FSDP2 engine in this process; it keeps its weights, since the rate is 0."""

    def __init__(self, path: str, micro: int) -> None:
        still = {"lr": 0.0, "clip_grad": 1e9, "total_training_steps": 10}
        self.worker = worker(path, vendor=None, micro_batch=micro, optimizer=still)
        self._step = self.worker.engine.optimizer_step
        self.worker.engine.optimizer_step = self._look

    def _look(self) -> float:
        """Keep the gradients that verl steps with: it forgets them afterwards."""
        found = {}
        for name, parameter in self.worker.engine.module.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).double().clone()
        self.found = flat(found)
        return float(self._step())

    def gradient(self, loss: Any, data: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        """Return the whole gradient of an update over this rank's rows, and verl's metrics."""
        ranks = torch.distributed.get_world_size()
        self.worker.set_loss_fn(loss)
        data = data.clone()
        size = len(data) * ranks
        tu.assign_non_tensor(
            data, mini_batch_size=size, global_batch_size=size, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}
        )
        output = self.worker.train_mini_batch(data)
        return self.found, {} if output is None else dict(tu.get(output, "metrics"))


def number(value: Any) -> float:
    """Return a metric of one mini-batch as a number."""
    value = value[0] if isinstance(value, list) else value
    return float(value.aggregate() if hasattr(value, "aggregate") else value)


def sampled_batch(policy: str, rows: int = 12, **extra: Any) -> TensorDict:
    """Return rows of different lengths, with advantages, and old log-probabilities off the policy's."""
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for row in range(rows):
        length = HORIZON - row % 4 // 3  # each fourth is shorter
        chosen.append(torch.randint(1, VOCABULARY, (length,), generator=generator))
    logps = plain_logps(policy, chosen)
    shifted = lambda scale: [(p + scale * torch.randn(p.shape, generator=generator)).float() for p in logps]  # noqa: E731
    # The reference is near, because verl cuts a token's KL at 10.
    fields = {
        "ref_log_prob": shifted(0.5), "old_log_probs": shifted(0.02), "rollout_log_probs": shifted(0.3),
        "advantages": [torch.full((len(r),), float((-1) ** i)) for i, r in enumerate(chosen)],
    }  # fmt: skip
    return batch_of(chosen, fields, **extra)


def aggregations(policy: str) -> None:
    """Compare what is added to verl's loss with verl's own k3, for every aggregation, on this rank's part of a batch."""
    engine = Engine(policy, 2)  # it joins the process group
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = tu.chunk_tensordict(sampled_batch(policy, calculate_entropy=True), ranks)[rank]
    for mode in MODES:
        stock = actor_config(
            use_kl_loss=True,
            kl_loss_coef=0.3,
            kl_loss_type="k3",
            loss_agg_mode=mode,
            entropy_coeff=0.01,
            loss_scale_factor=7,
        )
        theirs, their_metrics = engine.gradient(partial(ppo_loss, config=stock), data)
        ours, metrics = engine.gradient(make_loss(stock, block_of(kl=K3)), data)
        plain = dataclasses.replace(stock, use_kl_loss=False, global_batch_info={})
        without, _ = engine.gradient(partial(ppo_loss, config=plain), data)
        # What is added is far larger than the error.
        assert relative(ours, theirs) < 1e-5 and relative(without, theirs) > 0.01, mode
        assert metrics.keys() == their_metrics.keys(), mode
        for name in ("kl_loss", "loss") if metrics else ():
            found, expected = number(metrics[name]), number(their_metrics[name])
            assert math.isclose(found, expected, rel_tol=1e-5) and abs(expected) > 0.01, (mode, name)


def on_two_ranks(out: str) -> None:
    """Run `aggregations` on two ranks."""
    on_ranks(aggregations, 2, policy=build_policy(Path(out)))


def terms(out: str) -> None:
    """Check what rejection leaves of the KL, and that a coefficient which the batch carries is taken."""
    policy = build_policy(Path(out))
    engine = Engine(policy, 4)
    data = sampled_batch(policy)
    data["advantages"] = torch.zeros_like(data["advantages"])
    config = actor_config(use_kl_loss=True, kl_loss_coef=0.3, loss_agg_mode="seq-mean-token-sum")
    loss = make_loss(config, block_of(kl=K3))
    rejected = data.clone()
    rejected["response_mask"] = torch.zeros_like(data["response_mask"])
    once, _ = engine.gradient(loss, data)
    assert torch.equal(engine.gradient(loss, rejected)[0], once)
    # verl's own term goes with the responses that are rejected in the driver.
    stock = partial(ppo_loss, config=dataclasses.replace(config, kl_loss_type="k3", global_batch_info={}))
    assert engine.gradient(stock, rejected)[0].norm() == 0
    carried = tu.assign_non_tensor(data.clone(), **{COEF: 0.6})
    twice, metrics = engine.gradient(loss, carried)
    assert relative(twice, 2 * once) < 1e-6 and number(metrics["kl_coef"]) == 0.6


def weighed(out: str) -> list[str]:
    """Update with the weights of a correction, and without them."""
    policy = build_policy(Path(out))
    data = sampled_batch(policy)
    block = {"correction": {"preset": "token_truncate"}}
    built, weighted = worker(policy, block), data.clone()
    weighted["rollout_is_weights"] = data["old_log_probs"].exp()
    built.set_loss_fn(make_loss(actor_config(), block_of(**block)))
    return [refused(update, built, weighted), refused(update, built, data)]
