"""Gradients of the actor's loss through verl's FSDP2 engine, against exact ones, plain formulas and verl's own terms."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.verl.config import set_correction
from mismatch_ext.adapters.verl.loss import BASELINE, COEF, make_loss
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss, sft_loss

from examples.arithmetic.tokenizer import make_tokenizer
from tests.peers.forks import on_ranks
from tests.peers.verl.in_process.losses import (
    END,
    PROMPT,
    actor_config,
    batch_of,
    block_of,
    driven,
    flat,
    host_config,
    relative,
)
from tests.peers.verl.in_process.routes import refused
from tests.peers.verl.in_process.workers import parameters, update, worker

VOCABULARY, HORIZON = 4, 3
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# Unbiased with samples of another policy and the ratio of the sequence: (estimator, placement, target).
UNBIASED = (
    ("k1", "reward", "sequence"), ("k1", "both", "sequence"), ("k3", "both", "sequence"), ("k1", "reward", "token"),
    ("k2", "loss", "token"), ("k3", "both", "token"),
)  # fmt: skip


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
        BASELINE: [torch.tensor([0.7, -0.3, 1.1])[: len(r)] for r in responses],
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


def engine_exact_on_ranks(out: str) -> list[Any]:
    """Run `engine_exact` on two ranks, each with its part of the batch."""
    build_models(Path(out))
    return on_ranks(engine_exact, 2, out=out, micro=5)


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
    tu.assign_non_tensor(carried, **{COEF: 0.6})
    twice, metrics = engine.gradient(loss, carried)
    result["carried"] = [relative(twice, 2 * engine.gradient(loss, only_kl)[0]), number(metrics["kl_coef"])]
    result |= {"bypass": bypass(engine, data), "off_policy": off_policy(engine, data)}
    return result


def replaced(out: str) -> dict[str, Any]:
    """Update with a loss that something has set after the start, for each block that takes ours and for one that does not."""
    policy, reference = build_models(Path(out))
    data = sampled_batch(policy, reference)
    stock, found = partial(ppo_loss, config=actor_config()), {}
    kl = {"estimator": "k3", "placement": "loss", "target": "token", "baseline": "none", "coef": 0.3}
    blocks: dict[str, Any] = {
        "kl": {"kl": kl},
        "off-policy mask": {"correction": {"off_policy_threshold": 0.05}},
        "neither": {},
    }
    for name, block in blocks.items():
        built = worker(policy, block)
        built.set_loss_fn(make_loss(actor_config(), block_of(**block)))
        own = refused(update, built, data)
        before = parameters(built)
        built.set_loss_fn(stock)
        found[name] = [own, refused(update, built, data), before != parameters(built)]
        built.infer_batch(tu.assign_non_tensor(data.clone(), compute_loss=False))  # scores are not trained on
    return found | {"weights": _weighed(policy, data)}


def _weighed(policy: str, data: TensorDict) -> list[str]:
    """Update with weights of a correction, without them, and with losses that nobody knows to multiply by them."""
    block = {"correction": {"preset": "token_truncate"}}
    built, weighted = worker(policy, block), data.clone()
    weighted["rollout_is_weights"] = data["old_log_probs"].exp()
    built.set_loss_fn(make_loss(actor_config(), block_of(**block)))
    found = [refused(update, built, weighted), refused(update, built, data)]
    for other in (lambda **given: ppo_loss(actor_config(), **given), partial(sft_loss, config=actor_config())):
        built.set_loss_fn(other)
        found.append(refused(update, built, weighted))
    return found


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
    weigh = lambda d, mask, a: keep(d, mask) * d.sum(1, keepdim=True).exp().clamp(max=1.1)  # noqa: E731
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
    done = set_correction(repaired, None)
    truth = by_hand(engine, data, weigh)
    result: dict[str, Any] = {"done": done, "reinforce": {}}
    for name, config in {"stock": stock, "repaired": repaired}.items():
        found, metrics = engine.gradient(make_loss(driven(config), block_of()), data)
        names = sorted(key for key in metrics if "rollout_corr" in key)
        result["reinforce"][name] = {"error": relative(found, truth), "metrics": names}
    plain, _ = engine.gradient(partial(ppo_loss, config=driven(stock)), data)
    result["block_leaves_stock"] = relative(plain, engine.gradient(make_loss(driven(stock), block_of()), data)[0])
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
    set_correction(config, block.correction)
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
    logged = number(metrics["mismatch/off_policy_masked_fraction"])
    return {
        "error": relative(found, truth),
        "plain": relative(plain, truth),
        "logged": logged,
        "dropped": sum(dropped) / 3,
    }
