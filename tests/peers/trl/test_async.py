"""TRL's AsyncGRPOTrainer with a block: what is known of each token, and what the loss makes of it."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mismatch_ext.adapters.trl.async_grpo import (
    AsyncRun,
    Carried,
    CarryingCollator,
    Gate,
    Held,
    MismatchAsyncGRPOConfig,
    MismatchAsyncGRPOTrainer,
    Sampled,
    Terms,
    corrected,
    ending,
    plain_attention,
    versions_of,
)
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    TurnRecord,
    _AsyncRolloutLoop,
    _chain_to_sequences,
)
from trl.experimental.async_grpo.packing import TreeRow
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

from examples.trl_async import problems, tokenizer_of
from mismatch_ext.config import MismatchConfig
from mismatch_ext.correction import correct
from mismatch_ext.drift import UNKNOWN
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.presets import resolve
from tests.peers.trl.async_on_cpu import on_cpu
from tests.peers.trl.failing import fail


def sample(ids: list[int], prompt: int, versions: list[int], advantage: float = 1.0) -> dict[str, Any]:
    """Return a rollout as TRL hands it to its collator."""
    metrics = Carried({"reward": 0.0})
    metrics.versions = np.array([UNKNOWN] * prompt + versions)
    mask = np.array([0] * prompt + [1] * len(versions))
    logprobs = np.where(mask == 1, -1.0 - 0.1 * np.arange(len(ids)), 0.0).astype(np.float32)
    return {
        "input_ids": np.array(ids), "completion_mask": mask, "old_log_probs": logprobs, "advantage": advantage, "group_id": 0,
        "metrics": metrics,
    }  # fmt: skip


def row(*samples: dict[str, Any]) -> TreeRow:
    """Return a packed row."""
    found = TreeRow()
    for one in samples:
        found.add(one)
    return found


def test_another_layout_of_trls_is_refused_when_it_is_imported() -> None:
    gone = "import sys; sys.modules['trl.experimental.async_grpo.packing'] = None; import mismatch_ext.adapters.trl.async_grpo"
    ran = subprocess.run([sys.executable, "-c", gone], capture_output=True, text=True, check=False)
    *_, last = ran.stderr.splitlines()
    assert ran.returncode and re.match(
        r".*SeamError: AsyncGRPO .*async_grpo\.packing.*TRL 1\.18 .*trl==1\.16\.0", last
    ), last


# What is known of a token.


def test_the_gate_holds_requests_back_and_goes_to_another_process_only_when_it_is_spawned() -> None:
    gate = Gate(multiprocessing.get_context("spawn"))
    assert gate.enter() is None
    gate.open(Held(3, 4))
    assert gate.enter() == Held(3, 4) and gate.requests == 1
    gate.close()
    assert gate.enter() is None and gate.requests == 1
    gate.leave()
    assert gate.requests == 0
    assert pickle.dumps(gate)  # as TRL tries whether it can


def test_versions_go_through_trls_turns_forks_and_masks_with_their_tokens() -> None:
    cut = [*Sampled.of([-0.5, -0.6], 5), *Sampled.of([-0.7], 6)]
    turns = [
        TurnRecord([1, 2], [3, 4, 5], [*cut]),
        # The template takes the last token back, and puts a tool's answer behind it.
        TurnRecord([1, 2, 3, 4, 9, 9], [7, 8], [*Sampled.of([-0.8, -0.9], 7)]),
    ]
    (answer,), _ = _chain_to_sequences(turns[:1], "rollout", 1024)
    assert Carried.along({}, answer.old_log_probs).versions.tolist() == [UNKNOWN, UNKNOWN, 5, 5, 6]
    (sequence,), _ = _chain_to_sequences(turns, "rollout", 1024)
    assert sequence.input_ids == [1, 2, 3, 4, 9, 9, 7, 8]
    found = Carried.along({"reward": 1.0}, sequence.old_log_probs)
    assert found.versions.tolist() == [UNKNOWN, UNKNOWN, 5, 5, UNKNOWN, UNKNOWN, 7, 7]
    assert np.asarray(sequence.old_log_probs, dtype=np.float32).tolist() == pytest.approx(
        [0, 0, -0.5, -0.6, 0, 0, -0.8, -0.9]
    )
    assert found == {"reward": 1.0}
    again = pickle.loads(pickle.dumps(found))
    assert again == found and again.versions.tolist() == found.versions.tolist()


def test_versions_lie_beside_trls_own_terms_of_a_tree() -> None:
    # A prompt of three tokens in both, and the first answer token too.
    packed = row(sample([1, 2, 3, 4, 5], 3, [7, 8]), sample([1, 2, 3, 4, 6, 7], 3, [8, 8, 9]))
    assert versions_of(packed).tolist() == [7, 8, 8, 8, 9]
    assert len(packed.pack()["old_log_probs"]) == 5
    collator = CarryingCollator(DataCollatorForRollout(0))
    batch = collator([[packed]])
    assert batch["mismatch_versions"].shape == batch["token_index"].shape
    assert collator.prompts == [(1, 2, 3)]
    lost = sample([1, 2, 3], 2, [7])
    lost["metrics"] = {"reward": 0.0}
    with pytest.raises(RecordError, match="without the versions of its tokens"):
        collator([[row(lost)]])


# How it ends.


def test_a_worker_that_has_failed_is_not_waited_for() -> None:
    worker = AsyncRolloutWorker()
    goes_on = worker._mp_ctx.Event()
    worker._process = process = worker._mp_ctx.Process(
        target=fail, args=(worker._stop_event_mp, worker._failed_event, goes_on)
    )
    process.start()
    while not (sleeping := worker._stop_event_mp._cond._sleeping_count.get_value()):
        time.sleep(0.01)
    assert sleeping == 1
    goes_on.set()
    process.join()
    ended = threading.Thread(target=ending(worker), daemon=True)
    ended.start()
    ended.join(30)
    assert not ended.is_alive() and not process.is_alive() and worker._process is None


# What the loss makes of it.


@pytest.fixture(scope="module")
def stock(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a trainer without a block, which needs no server until it trains."""
    out = str(tmp_path_factory.mktemp("async"))
    args = MismatchAsyncGRPOConfig(
        output_dir=out, use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False
    )
    with on_cpu():
        yield MismatchAsyncGRPOTrainer(
            model=str(dense), reward_funcs=_zero, args=args, train_dataset=problems(4, seed=0),
            processing_class=tokenizer_of(str(dense))
        )  # fmt: skip


def _zero(completions: list[Any], **_: object) -> list[float]:
    return [0.0] * len(completions)


def test_without_a_block_all_parts_are_trls_own(stock: Any) -> None:
    assert type(stock.weight_transfer) is WeightTransferClient and type(stock.rollout_worker) is AsyncRolloutWorker
    assert stock.rollout_worker._loop_cls is _AsyncRolloutLoop and "gate" not in stock.rollout_worker._loop_kwargs
    assert "stop" not in vars(stock.rollout_worker)
    collator = DataCollatorForRollout(0)
    inputs = collator([[row(sample([1, 2, 3, 4, 5], 3, [0, 0], 0.7))]])
    stock.current_gradient_accumulation_steps = 1
    ours = stock.compute_loss(stock.model.train(), dict(inputs))
    assert ours.item() == AsyncGRPOTrainer.compute_loss(stock, stock.model, dict(inputs)).item()


@pytest.mark.parametrize(
    "block",
    [
        {"preset": "token_truncate"},
        {"level": "sequence", "bound": "mask", "upper": 1.5},
        {"mode": "bypass", "reject": {"token_k1": [0.05, 20]}},
        {"mode": "bypass", "loss": "reinforce", "level": "token", "upper": 2.0},
    ],
)
def test_trls_loss_has_the_gradient_that_the_correction_says(stock: Any, block: dict[str, Any]) -> None:
    settings = resolve(_section(block))
    model = stock.model.train()
    samples = [sample([1, 2, 3, 4, 5], 3, [0, 0], 0.7), sample([1, 2, 3, 4, 6, 7], 3, [0, 0, 0], -1.3)]
    inputs = CarryingCollator(DataCollatorForRollout(0))([[row(*samples)]])
    seen: dict[str, Any] = {}
    hook = model.register_forward_hook(lambda module, args, output: seen.setdefault("out", output))
    stock.current_gradient_accumulation_steps = 1
    stock.compute_loss(model, inputs)
    hook.remove()
    terms = Terms.of(seen["out"].log_probs.flatten(), inputs)
    changed, _ = corrected(terms, inputs, settings)
    model.zero_grad()
    stock.compute_loss(model, changed).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.zero_grad()
    done = correct(
        old_logprobs=terms.logprobs,
        rollout_logprobs=terms.rollout,
        response_mask=terms.mask,
        config=settings,
        advantages=terms.advantages,
    )
    loss = torch.zeros(())
    clips = settings.mode == "bypass" and settings.loss == "ppo_clip"
    for number, one in enumerate(samples):
        ids = torch.as_tensor(one["input_ids"])[None]
        with plain_attention(model):
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(-1, ids[0, 1:, None])[2:, 0]
        count = len(own)
        assert own.tolist() == pytest.approx(terms.logprobs[number, :count].tolist(), abs=1e-5)
        if clips:
            ratio = (own - terms.rollout[number, :count]).exp()
            gained = torch.minimum(ratio * one["advantage"], ratio.clamp(0.8, 1.2) * one["advantage"])
            loss = loss - (gained * done.mask[number, :count]).sum()
        else:
            loss = loss - (own * done.as_multiplier()[number, :count] * one["advantage"]).sum()
    (loss / 5).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(found[name], parameter.grad, atol=1e-5, rtol=1e-3), name
    assert any(bool(grad.abs().max() > 1e-4) for grad in found.values())


def test_a_measured_loss_is_trls_own_from_one_pass_of_the_model(stock: Any) -> None:
    inputs = CarryingCollator(DataCollatorForRollout(0))([[row(sample([1, 2, 3, 4, 5], 3, [0, 0], 0.7))]])
    measured: list[Any] = []
    passes: list[Any] = []
    log = SimpleNamespace(observe=lambda *found: measured.append(found), add_drift=lambda sums: None)
    run = object.__new__(AsyncRun)
    vars(run).update(trainer=stock, correction=None, log=log)
    stock.current_gradient_accumulation_steps = 1
    model = stock.model.train()
    plain = partial(AsyncGRPOTrainer.compute_loss, stock)
    expected = plain(model, dict(inputs)).item()
    logged = len(stock._metrics["train"]["ratio"])
    hook = model.register_forward_hook(lambda *_: passes.append(None))
    loss = run.loss(plain, model, dict(inputs))
    hook.remove()
    assert loss.item() == expected and loss.requires_grad
    assert len(passes) == len(measured) == 1 and len(stock._metrics["train"]["ratio"]) == logged + 1


def test_trls_loader_collates_versions_too(stock: Any) -> None:
    stock.args.token_budget, stock.mm = 64, SimpleNamespace(collator=None)
    try:
        loader = stock.get_train_dataloader()
        assert loader.base_dataloader.collate_fn is stock.mm.collator
        assert type(stock.mm.collator.inner) is DataCollatorForRollout
    finally:
        stock.args.token_budget, stock.mm = None, None


def _section(block: dict[str, Any]) -> Any:
    parsed = MismatchConfig.parse({"correction": block})
    assert parsed is not None
    return parsed.correction


# What is refused.


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"kl": {"coef": 0.1}}, "mismatch.kl with AsyncGRPO"),
        ({"sampling_mask": {}}, "mismatch.sampling_mask with AsyncGRPO"),
        ({"level": "observe"}, "mismatch.level='observe' with AsyncGRPO"),
        ({"routing": {"mode": "R2"}}, "mismatch.routing.mode='R2' with AsyncGRPO"),
        ({"routing": {"mode": "R3"}}, "mismatch.routing.mode='R3' with AsyncGRPO"),
        ({"lr": {"trigger": "mismatch_kl"}}, "mismatch.lr with AsyncGRPO"),
        ({"monitor": {"doctor": "first_batch"}}, "mismatch.monitor.doctor with AsyncGRPO"),
        (
            {"correction": {"preset": "token_truncate", "normalize": True}},
            "mismatch.correction.normalize=True with AsyncGRPO",
        ),
    ],
)
def test_what_is_not_there_is_refused_by_its_name(block: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        MismatchAsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, mismatch=block)


def test_flags_follow_the_precision(tmp_path: Path) -> None:
    config = MismatchAsyncGRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, mismatch={"precision": {"dtype": "float16"}}
    )
    assert config.fp16 and not config.bf16
