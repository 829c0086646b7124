"""Runs of TRL's AsyncGRPOTrainer against a real server, each in a process of its own."""

from __future__ import annotations

import json
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import requests
import torch
from mismatch_ext.adapters.trl.async_grpo import MismatchAsyncGRPOConfig, MismatchAsyncGRPOTrainer, plain_attention
from mismatch_ext.adapters.vllm.remote import RemoteEngine
from mismatch_ext.adapters.vllm.stamps import UNFINISHED, Stamps

from examples import trl_async
from examples.trl_async import problems, tokenizer_of
from mismatch_ext.drift import UNKNOWN
from mismatch_ext.log_reading import read_run
from tests.peers.trl.async_on_cpu import on_cpu
from tests.peers.trl.scenarios_server import At, outcome

KEPT = ("loss", "grad_norm", "entropy", "ratio", "kl", "learning_rate", "completions/mean_length")
KEPT_OF_ROLLOUTS = ("input_ids", "completion_mask", "old_log_probs", "metrics")


def even_digits(completions: list[Any], **_: object) -> list[float]:
    """Reward that varies between completions of a random model, so that there is a gradient."""
    texts = [str(turns[0].get("content", "")) for turns in completions]
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in texts]


def arguments(out: str, url: str, **overrides: Any) -> dict[str, Any]:
    """Return trainer arguments for a short run on a CPU."""
    return {
        "output_dir": out, "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 200, "max_steps": 3, "learning_rate": 2e-3, "report_to": "none", "save_strategy": "no",
        "vllm_server_base_url": url, "vllm_server_timeout": 60.0, "disable_tqdm": True, "gradient_checkpointing": False,
        "token_budget": 0, "max_staleness": 8, "max_inflight_tasks": 8, "queue_maxsize": 8, "seed": 0,
        **overrides,
    }  # fmt: skip


def build(model: str, out: str, url: str, block: Any, **overrides: Any) -> Any:
    """Build a trainer with a block."""
    args = MismatchAsyncGRPOConfig(**arguments(out, url, mismatch=block, **overrides))
    return MismatchAsyncGRPOTrainer(
        model=model,
        reward_funcs=even_digits,
        args=args,
        train_dataset=problems(64, seed=5),
        processing_class=tokenizer_of(model),
    )


def history(trainer: Any) -> list[dict[str, float]]:
    """Return what the trainer logged at each step."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k: v for k, v in entry.items() if k in KEPT or "mismatch/" in k} for entry in logged]


class _Truth:
    """Copies of the weights of each version, the rollouts of each step, and others that an update has cut.

    Each update after the first waits until answers are under way, so that it cuts some, and takes what is ready, so that the
    next step learns from what was cut.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        self.trained: list[list[dict[str, Any]]] = []
        self.left: list[dict[str, Any]] = []
        transfer = trainer.weight_transfer
        plain_send, plain_pause, loader = transfer.send_weights, transfer.pause, trainer.get_train_dataloader

        def send(iterator: Iterator[Any]) -> None:
            self.kept[trainer.state.global_step] = {k: v.clone() for k, v in trainer.model.state_dict().items()}
            plain_send(iterator)

        def pause() -> None:
            if self.kept:
                self.wait_for_answers()
            plain_pause()
            self.take_left()

        def loaded() -> Any:
            found = loader()
            inner = found.base_dataloader.collate_fn if hasattr(found, "base_dataloader") else found.collate_fn
            collate = inner.inner.torch_call

            def noting(examples: Any) -> Any:
                self.trained.append([sample for row in examples[0] for sample in row.samples])
                return collate(examples)

            inner.inner = noting
            return found

        stop = trainer.rollout_worker.stop

        def stopping() -> None:
            # A process does not end while nobody takes what it has put into a queue.
            ended = threading.Event()
            taking = threading.Thread(target=lambda: [self.take_left() for _ in iter(lambda: ended.wait(0.05), True)])
            taking.start()
            stop()
            ended.set()
            taking.join()

        trainer.rollout_worker.stop = stopping
        transfer.send_weights, transfer.pause = send, pause
        trainer.get_train_dataloader = loaded

    def wait_for_answers(self, tokens: int = 64) -> None:
        """Wait until the server, which is in the midst of answers, has sampled some tokens of them."""
        until, first = time.monotonic() + 30, None
        while time.monotonic() < until:
            text = requests.get(f"{self.trainer.mm.remote.http.url}/metrics", timeout=10).text
            running, sampled = (
                float(re.search(rf"^vllm:{name}{{.*}} (\S+)$", text, re.M)[1])  # type: ignore[index]
                for name in ("num_requests_running", "generation_tokens_total")
            )
            first = sampled if first is None or not running else first
            if sampled >= first + tokens:
                return
            time.sleep(0.02)

    def take_left(self) -> None:
        """Take what the rollout worker has ready, and keep what was cut."""
        with suppress(queue.Empty):
            while True:
                found = self.trainer.rollout_queue.get_nowait()
                sample = {name: getattr(found, name) for name in KEPT_OF_ROLLOUTS}
                self.left += [sample] if _is_cut(sample) else []

    def _scored(self, sample: dict[str, Any], step: int) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
        """Return a rollout's sampled log-probabilities, their versions, and what the weights of these and of a step say."""
        ids = torch.as_tensor(sample["input_ids"])[None]
        mask = torch.as_tensor(sample["completion_mask"])[1:].bool()
        versions = torch.as_tensor(sample["metrics"].versions)[1:][mask]
        found = {}
        for version in {*versions.tolist(), step} & set(self.kept):
            self.trainer.model.load_state_dict(self.kept[version])
            with self.trainer.mm.autocast():
                logits = self.trainer.model(input_ids=ids, use_cache=False).logits[0, :-1]
            found[version] = logits.float().log_softmax(-1).gather(-1, ids[0, 1:, None])[mask, 0]
        sampled = torch.as_tensor(sample["old_log_probs"])[1:][mask]
        return sampled, versions, found

    def told(self) -> dict[str, Any]:
        """Score every rollout once more, by the weights of every version, and return what that says of the run."""
        model = self.trainer.model.eval()
        now = {k: v.clone() for k, v in model.state_dict().items()}
        gaps, beside, other = [], [], []
        steps: list[dict[str, float]] = []
        with torch.no_grad(), plain_attention(model):
            for step, samples in enumerate([*self.trained, self.left]):
                own, drift, gap = [], [], []
                for sampled, versions, by in (self._scored(sample, step) for sample in samples):
                    right = torch.stack([by[int(v)][at] for at, v in enumerate(versions)])
                    gaps.append((right - sampled).abs())
                    own.append(gaps[-1])
                    if step in by:
                        drift.append((by[step] - right).abs()[versions != step])
                        gap.append((by[step] - sampled).abs())
                    # The tokens on both sides of each cut, by the weights of their own side and by those of the other.
                    for at in (versions[1:] != versions[:-1]).nonzero()[:, 0].tolist():
                        beside.append(gaps[-1][at : at + 2])
                        swapped = [by[int(versions[at + 1])][at], by[int(versions[at])][at + 1]]
                        other.append((torch.stack(swapped) - sampled[at : at + 2]).abs())
                steps.append({"numerics": _mean(own), "drift": _mean(drift), "gap": _mean(gap)})
        model.load_state_dict(now)
        model.train()
        return {
            "mean": _mean(gaps), "largest": float(torch.cat(gaps).max()), "tokens": sum(map(len, gaps)), "cuts": len(beside),
            "beside cuts": _mean(beside), "beside cuts, by the other side's": _mean(other), "steps": steps,
        }  # fmt: skip


def _is_cut(sample: dict[str, Any]) -> bool:
    versions = sample["metrics"].versions
    return len(set(versions[versions != UNKNOWN].tolist())) > 1


def _mean(parts: list[torch.Tensor]) -> float:
    return float(torch.cat(parts).mean()) if sum(map(len, parts)) else 0.0


def train(model: str, out: str, url: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train with a block, and hold each token to the weights of its version."""
    with on_cpu():
        trainer = build(model, out, url, block, queue_maxsize=0, **overrides)
        truth = _Truth(trainer)
        verdicts: list[Any] = []
        verify = trainer.mm.verifier.verify

        def noted(*args: Any) -> Any:
            verdicts.append(verify(*args))
            return verdicts[-1]

        trainer.mm.verifier.verify = noted
        trainer.train()
        return {
            "history": history(trainer),
            "truth": truth.told(),
            "verdicts": [verdict.status for verdict in verdicts],
        }


def example(model: str, out: str, url: str) -> dict[str, Any]:
    """Run the example in float16, with a reward that a random model gets, and hold each token to the weights of its version."""
    made: list[tuple[Any, _Truth]] = []

    def noted(**given: Any) -> Any:
        trainer = MismatchAsyncGRPOTrainer(**given)
        made.append((trainer, _Truth(trainer)))
        return trainer

    block = {"precision": {"dtype": "float16", "init_scale": 1024.0}}
    asked = f"--model_name_or_path {model} --output_dir {out} --vllm_server_base_url {url} --max_steps 3 --use_cpu"
    asked += (
        " --learning_rate 2e-3 --max_completion_length 200 --queue_maxsize 0 --max_inflight_tasks 8 --token_budget 0"
    )
    with (
        on_cpu(),
        mock.patch.object(sys, "argv", ["trl_async.py", *asked.split(), "--mismatch", json.dumps(block)]),
        mock.patch.object(trl_async, "reward", even_digits),
        mock.patch.object(trl_async, "MismatchAsyncGRPOTrainer", noted),
    ):
        trl_async.main()
    ((trainer, truth),) = made
    with on_cpu():
        return {
            "history": history(trainer),
            "truth": truth.told(),
            "engine": vars(trainer.mm.remote.reading()),
            "scaler": trainer.accelerator.scaler.state_dict(),
            "steps": len([step for step in read_run(Path(out, "mismatch")).steps if step.split == "train"]),
        }


def faults(model: str, out: str, url: str) -> dict[str, str]:
    """Plant faults between trainer and a server that has other weights, and return how each run ended."""
    block = {"precision": {"dtype": "float32"}}
    found: dict[str, str] = {}
    short = {"max_completion_length": 12, "max_steps": 2}
    with on_cpu():
        found["precision"] = outcome(lambda: build(model, f"{out}/precision", url, {"precision": {"dtype": "float16"}}))
        trainer = build(model, f"{out}/nothing", url, block, **short)
        send = trainer.mm.remote.send
        # They are read, and left out.
        trainer.mm.remote.send = lambda parameters: send([(name, values) for name, values in parameters if not name])
        found["nothing"] = outcome(trainer.train)
        trainer = build(model, f"{out}/other", url, block, **short)

        def overtake() -> None:
            RemoteEngine(trainer.mm.remote.http).weight_version = Stamps().begin().removesuffix(UNFINISHED)

        trainer.add_callback(At(overtake))
        found["other trainer"] = outcome(trainer.train)
    return found
