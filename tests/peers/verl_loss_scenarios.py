"""The actor's loss in the real verl, on a CPU and without Ray: `python -m tests.peers.verl_loss_scenarios NAME '{json}'`."""

from __future__ import annotations

import os

os.environ["VERL_PLATFORM"] = "cpu"
os.environ["VERL_USE_EXTERNAL_MODULES"] = "tests.peers.verl_cpu.platform"
os.environ["VERL_ENGINE_DEVICE"] = "cuda"
os.environ.setdefault("RANK", "0")
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("LOCAL_WORLD_SIZE", "1")

import dataclasses
import itertools
import json
import math
import pickle
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl  # noqa: F401  loads the platform before anything asks for it
from hydra import compose, initialize_config_module
from mismatch_ext.adapters.verl import correction as verl_correction
from mismatch_ext.adapters.verl import kl as verl_kl
from mismatch_ext.adapters.verl.loss import make_loss
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from verl.protocol import DataProto
from verl.trainer.config import CheckpointConfig
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from examples.arithmetic.tokenizer import make_tokenizer
from mismatch_ext.config import KlConfig, MismatchConfig
from mismatch_ext.errors import MismatchError
from mismatch_ext.kl import kl_surrogate
from mismatch_ext.kl.enumeration import Problem
from mismatch_ext.kl.facts import FACTS

VOCABULARY, HORIZON, END = 4, 3, 0
PROMPT = [1, 2, 3, 1]
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# Unbiased with samples of another policy and the ratio of the sequence: (estimator, placement, target).
UNBIASED = (
    ("k1", "reward", "sequence"), ("k1", "both", "sequence"), ("k3", "both", "sequence"), ("k1", "reward", "token"),
    ("k2", "loss", "token"), ("k3", "both", "token"),
)  # fmt: skip


# Settings.


def actor_config(loss: dict[str, Any] | None = None, **given: Any) -> FSDPActorConfig:
    """Return verl's configuration of an actor."""
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=4,
        policy_loss=PolicyLossConfig(**(loss or {})),
        **given,
    )


def host_config(*overrides: str) -> DictConfig:
    """Return verl's whole configuration, as its command line composes it."""
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        config = compose(
            config_name="ppo_trainer",
            overrides=[
                "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
                *overrides,
            ],
        )
    OmegaConf.set_struct(config, True)
    return config


def driven(config: DictConfig) -> Any:
    """Return the actor's configuration of a worker, as verl makes it from the driver's."""
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def block_of(**sections: Any) -> MismatchConfig:
    """Return a block."""
    block = MismatchConfig.parse(sections)
    assert block is not None
    return block


# Batches.


def nested(rows: list[Tensor]) -> Tensor:
    """Return rows of their own lengths in verl's layout."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch_of(
    responses: list[Tensor], fields: dict[str, list[Tensor]], prompts: list[Tensor] | None = None, **extra: Any
) -> TensorDict:
    """Return a batch as verl's workers get it; a field may replace those that are built."""
    prompts = prompts or [torch.tensor(PROMPT) for _ in responses]
    built = {
        "prompts": prompts, "responses": responses, "input_ids": [torch.cat(x) for x in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(len(p) + len(r)) for p, r in zip(prompts, responses, strict=True)],
        "response_mask": [torch.ones_like(r) for r in responses], "loss_mask": [torch.ones_like(r) for r in responses],
        "advantages": [torch.zeros(len(r)) for r in responses], "old_log_probs": [torch.zeros(len(r)) for r in responses],
        **fields,
    }  # fmt: skip
    data = TensorDict({name: nested(rows) for name, rows in built.items()}, batch_size=len(responses))
    tu.assign_non_tensor(data, **{"temperature": 1.0, "calculate_entropy": False, **extra})
    return data


def every_response() -> tuple[list[Tensor], list[Tensor]]:
    """Return every response of at most `HORIZON` tokens, ended by `END` where it is shorter, and log mu of its tokens.

    mu draws each response with the same probability, so that a mean over the rows is an expectation over mu.
    """
    responses: list[list[int]] = []
    for length in range(1, HORIZON + 1):
        for body in itertools.product(range(1, VOCABULARY), repeat=length - 1):
            responses += [[*body, last] for last in range(VOCABULARY) if last == END or length == HORIZON]
    count = lambda prefix: sum(r[: len(prefix)] == prefix for r in responses)  # noqa: E731
    behavior = [[count(r[: t + 1]) / count(r[:t]) for t in range(len(r))] for r in responses]
    return [torch.tensor(r) for r in responses], [torch.tensor(b).log() for b in behavior]


# Models.


def build_models(directory: Path) -> tuple[str, str]:
    """Save policy and reference: two Qwen3 of one shape, with a vocabulary that can be enumerated."""
    for seed, name in enumerate(("policy", "reference")):
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, initializer_range=0.3, tie_word_embeddings=False, bos_token_id=None,
            eos_token_id=END, pad_token_id=END,
        )  # fmt: skip
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(directory / name)
        make_tokenizer().save_pretrained(directory / name)
    return str(directory / "policy"), str(directory / "reference")


def plain_logps(path: str, responses: list[Tensor]) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Return a model, the log-probability of each token, and the whole distributions, from a plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    rows = [torch.cat([torch.tensor(PROMPT), r]) for r in responses]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logps = model(input_ids=tokens).logits.double().log_softmax(-1)
    whole = [logps[i, len(PROMPT) - 1 : len(PROMPT) - 1 + len(r)] for i, r in enumerate(responses)]
    return model, [w.gather(-1, r[:, None])[:, 0] for w, r in zip(whole, responses, strict=True)], whole


def by_name(model: Any) -> dict[str, Tensor]:
    """Return the gradients of a model's parameters, float64."""
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """Return gradients as one vector, in the order of their names."""
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def relative(a: Tensor, b: Tensor) -> float:
    """Return the relative distance of two vectors."""
    return float((a - b).norm() / b.norm())


class Engine:
    """verl's TrainingWorker with its FSDP2 engine in this process; it keeps its weights, since the rate is 0."""

    def __init__(self, path: str, micro: int) -> None:
        model = HFModelConfig(
            path=path, use_remove_padding=False, enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        )  # fmt: skip
        full = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        engine = FSDPEngineConfig(
            strategy="fsdp2", mixed_precision=full, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro,
            infer_micro_batch_size_per_gpu=micro, use_torch_compile=False,
        )  # fmt: skip
        self.worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model", model_config=model, engine_config=engine,
                optimizer_config=FSDPOptimizerConfig(lr=0.0, clip_grad=1e9, total_training_steps=10),
                checkpoint_config=CheckpointConfig(),
            )
        )  # fmt: skip
        self.worker.reset()
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


# Scenarios in verl's engine.


def exact_batch(policy: str, reference: str, **extra: Any) -> tuple[TensorDict, dict[str, Tensor]]:
    """Return a batch of every response, and the true gradients of KL(pi||ref) for both targets."""
    responses, behavior = every_response()
    model, logps, whole = plain_logps(policy, responses)
    with torch.no_grad():
        _, ref_logps, ref_whole = plain_logps(reference, responses)
    truth = {}
    pairs = list(zip(logps, ref_logps, strict=True))
    value = sum(p.sum().exp() * (p - r).sum() for p, r in pairs)
    model.zero_grad()
    value.backward(retain_graph=True)
    truth["sequence"] = flat(by_name(model))
    # Each prefix once, weighed by how often the policy comes by, that weight held fixed.
    seen: dict[tuple[int, ...], Tensor] = {}
    for tokens, p, w, r in zip(responses, logps, whole, ref_whole, strict=True):
        for t in range(len(tokens)):
            visits = p[:t].sum().detach().exp()
            seen[tuple(tokens[:t].tolist())] = visits * (w[t].exp() * (w[t] - r[t])).sum()
    model.zero_grad()
    sum(seen.values()).backward()  # type: ignore[union-attr]
    truth["token"] = flat(by_name(model))
    fields = {
        "ref_log_prob": [r.float() for r in ref_logps], "rollout_log_probs": behavior, "old_log_probs": behavior,
        # A baseline that knows nothing of the response changes nothing.
        verl_kl.BASELINE: [torch.tensor([0.7, -0.3, 1.1])[: len(r)] for r in responses],
    }  # fmt: skip
    return batch_of(responses, fields, **extra), truth


def engine_exact(out: str, micro: int = 10) -> dict[str, Any]:
    """Hold the gradient of each unbiased configuration through verl's engine against the true one, and verl's own terms."""
    built = Path(out, "reference").exists()
    policy, reference = (f"{out}/policy", f"{out}/reference") if built else build_models(Path(out))
    engine = Engine(policy, micro)
    data, truth = exact_batch(policy, reference)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = len(data) // ranks
    data = tu.chunk_tensordict(data, ranks)[rank]
    actor = actor_config(use_kl_loss=True, kl_loss_coef=0.3, loss_agg_mode="seq-mean-token-sum")
    result: dict[str, Any] = {"rows": rows, "ours": {}, "stock": {}}
    for estimator, placement, target in UNBIASED:
        for baseline in ("none", "leave_one_out"):
            kl = {
                "estimator": estimator,
                "placement": placement,
                "target": target,
                "ratio": "sequence",
                "baseline": baseline,
            }
            found, metrics = engine.gradient(make_loss(actor, block_of(kl=kl)), data)
            result["ours"][f"{estimator}/{placement}/{target}/{baseline}"] = relative(found, 0.3 * truth[target])
            result.setdefault("coef", []).append(number(metrics["kl_coef"]) if metrics else 0.3)
    for name in ("k1", "k2", "low_var_kl", "k3+"):
        stock = dataclasses.replace(actor, kl_loss_type=name, global_batch_info={})
        found, _ = engine.gradient(partial(ppo_loss, config=stock), data)
        result["stock"][name] = min(relative(found, 0.3 * truth[target]) for target in ("sequence", "token"))
    return result


def on_ranks(out: str, count: int = 2) -> dict[str, Any]:
    """Run `engine_exact` on several ranks, each with its part of the batch; one that fails ends the others."""
    build_models(Path(out))
    payload = json.dumps({"out": out, "micro": 5})
    logs = [Path(out, f"rank{r}.txt") for r in range(count)]
    ranks = []
    try:
        for r, log in enumerate(logs):
            env = {"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            with log.open("w") as output:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __spec__.name, "engine_exact", payload],
                        env={**os.environ, **{name: str(value) for name, value in env.items()}},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        end = time.monotonic() + 200
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                raise TimeoutError(f"ranks still run: {[rank.poll() for rank in ranks]}")
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("".join(log.read_text()[-3000:] for log in logs))
    return {"ranks": [json.loads(log.read_text().rsplit("RESULT ", 1)[1].splitlines()[0]) for log in logs]}


def sampled_batch(policy: str, reference: str, rows: int = 12, **extra: Any) -> TensorDict:
    """Return rows of different lengths, with advantages, and old log-probabilities off the policy's."""
    generator = torch.Generator().manual_seed(0)
    everything, _ = every_response()
    chosen = [everything[i] for i in torch.randperm(len(everything), generator=generator)[:rows].tolist()]
    with torch.no_grad():
        _, logps, _ = plain_logps(policy, chosen)
        _, ref_logps, _ = plain_logps(reference, chosen)
    shifted = lambda scale: [(p + scale * torch.randn(p.shape, generator=generator)).float() for p in logps]  # noqa: E731
    fields = {
        "ref_log_prob": [r.float() for r in ref_logps], "old_log_probs": shifted(0.02), "rollout_log_probs": shifted(0.3),
        "advantages": [torch.full((len(r),), float((-1) ** i)) for i, r in enumerate(chosen)],
    }  # fmt: skip
    return batch_of(chosen, fields, **extra)


def engine_terms(out: str) -> dict[str, Any]:
    """Compare what is added to verl's loss with verl's own k3, for every aggregation, and what rejection does to it."""
    policy, reference = build_models(Path(out))
    engine = Engine(policy, 4)
    data = sampled_batch(policy, reference, calculate_entropy=True)
    kl = {"estimator": "k3", "placement": "loss", "target": "token"}
    result: dict[str, Any] = {"modes": {}}
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
        ours, metrics = engine.gradient(make_loss(stock, block_of(kl=kl)), data)
        without, _ = engine.gradient(
            partial(ppo_loss, config=dataclasses.replace(stock, use_kl_loss=False, global_batch_info={})), data
        )
        result["modes"][mode] = {
            "error": relative(ours, theirs), "share_of_kl": relative(without, theirs),
            "metrics": sorted(metrics) == sorted(their_metrics),
            "kl_loss": [number(metrics["kl_loss"]), number(their_metrics["kl_loss"])],
            "loss": [number(metrics["loss"]), number(their_metrics["loss"])],
        }  # fmt: skip
    config = actor_config(use_kl_loss=True, kl_loss_coef=0.3, loss_agg_mode="seq-mean-token-sum")
    loss = make_loss(config, block_of(kl=kl))
    only_kl = data.clone()
    only_kl["advantages"] = torch.zeros_like(data["advantages"])
    rejected = only_kl.clone()
    rejected["response_mask"] = torch.zeros_like(data["response_mask"])
    result["rejected_keeps_kl"] = relative(engine.gradient(loss, rejected)[0], engine.gradient(loss, only_kl)[0])
    stock = partial(ppo_loss, config=dataclasses.replace(config, kl_loss_type="k3", global_batch_info={}))
    norms = [float(engine.gradient(stock, given)[0].norm()) for given in (rejected, only_kl)]
    result["rejected_keeps_verls_kl"] = norms[0] / norms[1]
    carried = only_kl.clone()
    tu.assign_non_tensor(carried, **{verl_kl.COEF: 0.6})
    twice, metrics = engine.gradient(loss, carried)
    result["carried"] = [relative(twice, 2 * engine.gradient(loss, only_kl)[0]), number(metrics["kl_coef"])]
    result |= {"bypass": bypass(engine, data), "off_policy": off_policy(engine, data)}
    return result


def by_hand(engine: Engine, data: TensorDict, weigh: Any) -> Tensor:
    """Return the gradient of mean over rows of sum_t -w A log pi, through the engine's own log-probabilities."""

    def loss(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
        from verl.workers.utils.padding import no_padding_2_padding

        logps = no_padding_2_padding(model_output["log_probs"], data)
        padded = data.select("rollout_log_probs", "advantages", "response_mask").to_padded_tensor()
        mask = padded["response_mask"].bool()
        difference = torch.where(mask, logps.detach() - padded["rollout_log_probs"], 0.0)
        term = -weigh(difference, mask, padded["advantages"]) * padded["advantages"] * logps
        return torch.where(mask, term, 0.0).sum() / data["global_batch_size"], {}

    return engine.gradient(loss, data)[0]


def bypass(engine: Engine, data: TensorDict) -> dict[str, Any]:
    """Hold verl's loss with its own bypass settings, as its workers get them and as they are driven, against plain formulas."""
    data = data.clone()
    data["old_log_probs"] = data["rollout_log_probs"]  # what verl's trainer does in this mode
    keep = lambda d, mask: ((d.sum(1) / mask.sum(1)).abs() < 0.1)[:, None]  # noqa: E731
    formulas = {
        "reinforce": lambda d, mask, a: keep(d, mask) * d.sum(1, keepdim=True).exp().clamp(max=1.1),
        "mask": lambda d, mask, a: d.exp() * (d.exp() <= 1.1),
        "geometric": lambda d, mask, a: (d.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp().clamp(max=1.1),
    }
    bounds = f"{math.exp(-0.1)!r}_{math.exp(0.1)!r}"
    given = [
        f"algorithm.rollout_correction.{key}={value}"
        for key, value in {
            "bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 1.1,
            "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": f"'{bounds}'",
        }.items()
    ]  # fmt: skip
    shape = ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"]
    stock, repaired = host_config(*given, *shape), host_config(*given, *shape)
    done = verl_correction.set_correction(repaired, None)
    truth = by_hand(engine, data, formulas["reinforce"])
    result: dict[str, Any] = {"done": done, "reinforce": {}}
    for name, config in {"stock": stock, "repaired": repaired}.items():
        found, metrics = engine.gradient(make_loss(driven(config), block_of()), data)
        names = sorted(key for key in metrics if "rollout_corr" in key)
        result["reinforce"][name] = {"error": relative(found, truth), "metrics": names}
    plain, _ = engine.gradient(partial(ppo_loss, config=driven(stock)), data)
    result["block_leaves_stock"] = relative(plain, engine.gradient(make_loss(driven(stock), block_of()), data)[0])
    sections = {
        "reinforce": {
            "mode": "bypass", "loss": "reinforce", "level": "sequence", "upper": 1.1, "reject": "seq_mean_k1",
            "reject_threshold": bounds,
        },
        "mask": {"mode": "bypass", "loss": "reinforce", "level": "token", "bound": "mask", "upper": 1.1},
        "geometric": {"mode": "bypass", "loss": "reinforce", "level": "geometric", "upper": 1.1},
    }  # fmt: skip
    result["block"] = {}
    for name, section in sections.items():
        config = host_config(*shape)
        block = block_of(correction=section)
        verl_correction.set_correction(config, block.correction)
        found, metrics = engine.gradient(make_loss(driven(config), block), data)
        result["block"][name] = {
            "error": relative(found, by_hand(engine, data, formulas[name])),
            "loss_mode": config.actor_rollout_ref.actor.policy_loss.loss_mode,
            "bypass": config.algorithm.rollout_correction.bypass_mode,
            "logs": "rollout_corr/kl" in metrics,
        }
    return result


def off_policy(engine: Engine, data: TensorDict) -> dict[str, Any]:
    """Hold the off-policy mask against the plain formula."""
    data = data.clone()
    data["old_log_probs"] = data["rollout_log_probs"]
    block = block_of(correction={"off_policy_threshold": 0.05})
    config = host_config(
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "actor_rollout_ref.actor.clip_ratio=1e6",
        "actor_rollout_ref.actor.clip_ratio_high=1e6", "actor_rollout_ref.actor.clip_ratio_low=1e6",
        "actor_rollout_ref.actor.clip_ratio_c=1e6",
    )  # fmt: skip
    verl_correction.set_correction(config, block.correction)
    loss = make_loss(driven(config), block)
    found, metrics = engine.gradient(loss, data)
    dropped: list[float] = []

    def weigh(difference: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        drift = -difference.sum(1) / mask.sum(1)
        drop = (advantages[:, 0] < 0) & (drift > 0.05)
        dropped.append(float(drop.double().mean()))
        return difference.exp() * ~drop[:, None]

    truth = by_hand(engine, data, weigh)
    plain, _ = engine.gradient(partial(ppo_loss, config=driven(config)), data)
    logged = number(metrics["rollout_corr/off_policy_masked_fraction"])
    return {
        "error": relative(found, truth),
        "plain": relative(plain, truth),
        "logged": logged,
        "dropped": sum(dropped) / 3,
    }


# Scenarios without an engine.


def loss_on(loss: Any, logps: Tensor, data: TensorDict) -> Any:
    """Call a loss as verl's engine does, with log-probabilities `[N, T]` of responses of one length."""
    rows, length = logps.shape
    prompt = data["prompts"].offsets().diff().tolist()
    parts = [torch.cat([logps.new_zeros(p - 1), logps[i], logps.new_zeros(1)]) for i, p in enumerate(prompt)]
    offsets = torch.tensor([0, *[p + length for p in prompt]]).cumsum(0)
    data = data.clone()
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=rows * length, global_batch_size=rows)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)}
    return loss(model_output=output, data=data, dp_group=None)


def direct_exact() -> dict[str, Any]:
    """Hold every documented configuration through verl's ppo_loss against exact values, in float64."""
    result = {}
    for fact in FACTS:
        problem = Problem.random(3, 3, 1, lag=0.0 if fact.sampling == "on-policy" else 0.3)
        tree = problem.tree
        logps = tree.logprobs(problem.policy).requires_grad_()
        rows = len(logps)
        behavior, reference = tree.logprobs(problem.behavior), tree.logprobs(problem.reference)
        fields = {
            "ref_log_prob": list(reference),
            "rollout_log_probs": list(behavior),
            "old_log_probs": list(logps.detach()),
        }
        data = batch_of(list(tree.sequences), fields)
        config = actor_config(use_kl_loss=True, loss_agg_mode="seq-mean-token-sum")
        loss, metrics = loss_on(make_loss(config, MismatchConfig(kl=fact.config)), logps, data)
        per_row = torch.autograd.grad(loss, logps)[0] * rows if loss.requires_grad else torch.zeros_like(logps)
        # The mean over rows is that of verl's aggregation; the chain to the policy's table weighs each row as it is sampled.
        table = problem.policy.clone().requires_grad_()
        weights = problem.probabilities
        found = torch.autograd.grad(tree.logprobs(table), table, weights[:, None] * per_row)[0]
        documented, size = fact.documented_gradient(problem), fact.truth(problem)[1].norm()
        name = f"{fact.estimator}/{fact.placement}/{fact.target}/{fact.sampling}"
        result[name] = {
            "documented": float((found - documented).norm() / size), "unbiased": fact.unbiased,
            "true": float((found - fact.truth(problem)[1]).norm() / size), "mode": metrics["kl_loss"].aggregation.value,
        }  # fmt: skip
    return result


def proto(rows: int = 12, length: int = 7, seed: int = 0) -> Any:
    """Return a padded batch of the driver: three prompts, with lengths of their own and gaps from small to large."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=generator)
    old = -2 * torch.rand(rows, length, generator=generator)
    gap = 10.0 ** (-4 + 4 * torch.rand(rows, 1, generator=generator)) * draw(rows, length)
    batch = {
        "old_log_probs": old, "rollout_log_probs": old - gap, "ref_log_prob": old + 0.3 * draw(rows, length),
        "response_mask": mask.long(), "token_level_scores": draw(rows, length) * mask,
    }  # fmt: skip
    batch = {k: torch.where(mask, v, 0) for k, v in batch.items()}
    uid = np.array([f"prompt {i % 3}" for i in range(rows)], dtype=object)
    return DataProto.from_dict(tensors=batch, non_tensors={"uid": uid})


def presets() -> dict[str, Any]:
    """Compare each preset by name with verl's own factory method, through verl's code and, in our words, through ours."""
    result = {}
    for name in sorted(verl_correction.VERL_PRESETS):
        theirs = getattr(RolloutCorrectionConfig, name)()
        config = host_config(f"+mismatch.correction.preset={name}")
        block = block_of(**OmegaConf.to_container(config.mismatch))  # type: ignore[arg-type]
        verl_correction.set_correction(config, block.correction)
        settings = verl_correction.settings_of(block.correction)  # type: ignore[arg-type]
        found = {"native": 0.0, "own": 0.0, "masks": True, "bypass": theirs.bypass_mode, "rejected": 0, "weighted": 0}
        if theirs.bypass_mode:
            found |= bypass_preset(theirs, config, block)
        for seed in range(8):
            stock, native, own = proto(seed=seed), proto(seed=seed), proto(seed=seed)
            plain = stock.batch["response_mask"]
            stock, _ = compute_rollout_correction_and_add_to_batch(stock, theirs)
            native, _ = compute_rollout_correction_and_add_to_batch(native, config.algorithm.rollout_correction)
            verl_correction.apply_correction(own, settings)
            for kind, other in (("native", native), ("own", own)):
                found["masks"] &= torch.equal(stock.batch["response_mask"].long(), other.batch["response_mask"].long())
                pair = [b.batch.get("rollout_is_weights", None) for b in (stock, other)]
                found["masks"] &= (pair[0] is None) == (pair[1] is None)
                if pair[0] is not None:
                    found[kind] = max(found[kind], float((pair[0] - pair[1]).abs().max()))
                    found["weighted"] += int((pair[0][plain.bool()] != 1).sum())
            found["rejected"] += int((plain - stock.batch["response_mask"].long()).sum())
        result[name] = found
    return result


def bypass_preset(theirs: Any, config: DictConfig, block: MismatchConfig) -> dict[str, Any]:
    """Compare loss and gradient of verl's bypass loss with verl's own configuration, and with what the name was driven to."""
    stock = actor_config(loss={"loss_mode": "bypass_mode", "rollout_correction": theirs})
    losses, gradients = [], []
    sequences = [torch.randint(0, 4, (5,), generator=torch.Generator().manual_seed(i)) for i in range(12)]
    generator = torch.Generator().manual_seed(7)
    logps = -2 * torch.rand(12, 5, generator=generator)
    gap = 10.0 ** (-4 + 4 * torch.rand(12, 1, generator=generator)) * torch.randn(12, 5, generator=generator)
    fields = {"old_log_probs": list(logps - gap), "advantages": list(torch.randn(12, 5, generator=generator))}
    for loss in (partial(ppo_loss, config=stock), make_loss(driven(config), block)):
        given = logps.clone().requires_grad_()
        value, _ = loss_on(loss, given, batch_of(sequences, fields))
        losses.append(float(value.detach()))
        gradients.append(torch.autograd.grad(value, given)[0])
    return {"loss_error": abs(losses[0] - losses[1]), "gradient_error": float((gradients[0] - gradients[1]).abs().max()),
            "gradient": float(gradients[0].abs().max())}  # fmt: skip


def baselines() -> dict[str, Any]:
    """Compare the driver's baseline with the one that the core computes where it sees the whole batch."""
    result = {}
    for estimator, ratio, target in itertools.product(
        ("k1", "k3"), ("none", "token", "sequence"), ("token", "sequence")
    ):
        kl = KlConfig(estimator=estimator, placement="both", ratio=ratio, target=target, coef=1.0)  # type: ignore[arg-type]
        data = proto()
        mask, logps = data.batch["response_mask"].bool(), data.batch["old_log_probs"].clone().requires_grad_()
        groups = torch.arange(len(mask)) % 3
        behavior = data.batch["rollout_log_probs"]
        whole = kl_surrogate(logps, data.batch["ref_log_prob"], mask, kl, behavior_logprobs=behavior, groups=groups)
        expected = torch.autograd.grad(whole.sum(), logps)[0]
        fields = {**data.batch, "loss_mask": mask, verl_kl.BASELINE: verl_kl.baseline(data, kl)}
        # Row by row, as a micro-batch of one row is.
        terms = [
            verl_kl.loss_term(logps[i : i + 1], {k: v[i : i + 1] for k, v in fields.items()}, kl).sum()
            for i in range(len(mask))
        ]
        found = torch.autograd.grad(torch.stack(terms).sum(), logps)[0]
        plain = dataclasses.replace(kl, baseline="none")
        without = torch.autograd.grad(verl_kl.loss_term(logps, fields, plain).sum(), logps)[0]
        result[f"{estimator}/{ratio}/{target}"] = {
            "error": relative(found, expected),
            "share": relative(without, expected),
        }
    return result


def sessions() -> Any:
    """Return the baselines of four responses to a prompt, without keys and with keys by which the last two are one session's."""
    d = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 7.0], [9.0, 9.0]])
    tensors = {
        "old_log_probs": d - 10,
        "ref_log_prob": torch.full((4, 2), -10.0),
        "response_mask": torch.ones(4, 2).long(),
    }
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["a"] * 4, dtype=object)})
    section = KlConfig(coef=1.0)
    return [verl_kl.baseline(data, section, keys).tolist() for keys in (None, ["a_0_0", "a_1_0", "a_2_0", "a_2_1"])]


def rewards() -> dict[str, Any]:
    """Hold the KL in verl's rewards, and a coefficient that follows a target, against plain formulas."""
    data = proto()
    section = KlConfig(estimator="k1", placement="reward", reward_path="rewards", coef=0.5)
    metrics = verl_kl.apply_kl_to_rewards(data, section, 0.5)
    mask = data.batch["response_mask"]
    d = (data.batch["old_log_probs"] - data.batch["ref_log_prob"]) * mask
    expected = data.batch["token_level_scores"] - 0.5 * d
    section = block_of(kl={"coef": 0.1, "controller": {"target_kl": 1e-3, "proportional": 0.5, "integral": 0.1}}).kl  # type: ignore[assignment]
    control = verl_kl.KlControl(section, 0.1)
    coefs = [control.begin(data)["mismatch/kl_coef"] for _ in range(3)]
    resumed = verl_kl.KlControl(section, 0.1)
    resumed.load_state_dict(json.loads(json.dumps(control.state_dict())))
    return {
        "error": float((data.batch["token_level_rewards"] - expected).abs().max()), "spread": float(d.sum(1).std()),
        "metrics": metrics, "mean": float((d.sum(1) / mask.sum(1)).mean()), "coefs": coefs,
        "next": [control.begin(data)["mismatch/kl_coef"], resumed.begin(data)["mismatch/kl_coef"]],
        "k1": [control.begin(data)["mismatch/kl_ref_k1"], float(d.sum() / mask.sum())],
    }  # fmt: skip


def edges() -> dict[str, Any]:
    """Pickle a loss, and compute micro-batches that verl fills up or that lack a field."""
    result: dict[str, Any] = {}
    config = actor_config(
        loss={"loss_mode": "bypass_mode", "rollout_correction": RolloutCorrectionConfig.bypass_pg_is()}
    )
    data = batch_of([torch.tensor([END])] * 2, {"response_mask": [torch.zeros(1).long()] * 2})
    logps = torch.full((2, 1), -1.0)
    full = batch_of([torch.tensor([END])] * 2, {"advantages": [torch.ones(1)] * 2})
    try:
        loss_on(partial(ppo_loss, config=config), logps, data)
        result["stock"] = "computed"
    except ValueError as error:
        result["stock"] = str(error)
    for name, correction in {
        "native": {"preset": "bypass_pg_is"},
        "own": {"mode": "bypass", "loss": "reinforce", "level": "geometric", "upper": 2.0},
    }.items():
        loss = pickle.loads(pickle.dumps(make_loss(config, block_of(correction=correction))))
        given = logps.clone().requires_grad_()
        value, metrics = loss_on(loss, given, data)
        value.backward()
        result[name] = {
            "loss": float(value.detach()), "gradient": float(given.grad.abs().max()),
            "same_metrics": sorted(metrics) == sorted(loss_on(loss, logps, full)[1]),
        }  # fmt: skip
    loss = make_loss(actor_config(), block_of(kl={"coef": 0.1}))
    for name, fields in {"reference": {}, "baseline": {"ref_log_prob": [torch.zeros(1)] * 2}}.items():
        try:
            loss_on(loss, logps, batch_of([torch.tensor([END])] * 2, fields))
            result[name] = ""
        except MismatchError as error:
            result[name] = f"{type(error).__name__}: {error}"
    plain = actor_config()
    untouched = make_loss(plain, block_of(precision={"dtype": "float16"}))
    result["untouched"] = untouched.func is ppo_loss and untouched.keywords == {"config": plain}  # type: ignore[attr-defined]
    return result


def set_up(overrides: list[str], section: str, given: dict[str, Any]) -> Any:
    """Return what a section sets in verl's configuration, or the error."""
    config = host_config(*overrides)
    before = OmegaConf.to_container(config, resolve=False)
    part = getattr(block_of(**{section: given}), section) if given else None
    try:
        done = verl_correction.set_correction(config, part) if section == "correction" else verl_kl.set_kl(config, part)
    except MismatchError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    driven(config)
    return {"done": done, "changed": differences(before, OmegaConf.to_container(config, resolve=False))}


def differences(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    """Return what differs in two configurations, by dotted name."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {} if before == after else {path: after}
    found = {}
    for key in after:
        found |= differences(before.get(key), after[key], f"{path}.{key}" if path else str(key))
    return found


def direct(cases: list[Any]) -> dict[str, Any]:
    """Run everything that needs no engine in one process."""
    return {
        "exact": direct_exact(), "presets": presets(), "baselines": baselines(), "sessions": sessions(),
        "rewards": rewards(), "edges": edges(),
        "settings": [set_up(*case) for case in cases],
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("RESULT " + json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
