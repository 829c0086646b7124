"""Faults in verl's processes, injected where VERL_CPU_FAULT names one. Loaded when Python starts, before verl and vLLM.

A fault of a rollout may strike later than in the first step, `NAME@STEP`: what happened before it is then a run like any other.
Several are separated by commas. Some strike at several steps, `NAME@STEP+STEP`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.peers.verl.cpu.after_import import AfterImport, Missing

FAULT = "VERL_CPU_FAULT"
MESSAGE = "injected by VERL_CPU_FAULT"
LOST = "model.layers.2.mlp.down_proj.weight"
"""The tensor that `lost_tensor` loses: of those that are compared by probes alone."""
ALL_STEPS = {
    name: [int(step) for step in (steps or "1").split("+")]
    for name, _, steps in (fault.partition("@") for fault in os.environ.get(FAULT, "").split(","))
    if name
}
STEPS = {name: steps[0] for name, steps in ALL_STEPS.items()}
"""The first step at which each fault strikes."""


def no_plugin_in_the_worker() -> None:
    """Let our package fail in the Ray worker of the actor, which verl gives a rank, and load everywhere else."""
    Missing(
        "mismatch_ext.adapters.verl",
        lambda: "RANK" in os.environ and multiprocessing.parent_process() is None,
        MESSAGE,
    )


def no_plugin_in_the_rollout() -> None:
    """Let our package fail in vLLM's engine, a child of the rollout server, and load everywhere else."""
    Missing("mismatch_ext.adapters.verl", lambda: multiprocessing.parent_process() is not None, MESSAGE)


Kwargs = dict[str, Any]


def _spoil_answers(chosen: Callable[[Kwargs], bool], spoil: Callable[[Any], None]) -> None:
    """Spoil the outputs of the agent loops' chosen calls."""

    def change(module: Any) -> None:
        for loop in (module.SeededSingleTurn, module.SeededTools):
            change_loop(loop)

    def change_loop(loop: Any) -> None:
        original = loop.run

        async def run(self: Any, sampling_params: Kwargs, **kwargs: Any) -> Any:
            output = await original(self, sampling_params, **kwargs)
            if chosen(kwargs):
                spoil(output)
            return output

        loop.run = run

    AfterImport("tests.peers.verl.cpu.agent_loop", change)


def nonfinite_logprob() -> None:
    """Let one answer's second token, or its only one, have a log-probability that is not a number."""
    spoiled: list[bool] = []

    def chosen(kwargs: Kwargs) -> bool:
        return not spoiled and kwargs["session_id"] == 1 and kwargs["global_steps"] >= STEPS["nonfinite_logprob"]

    def spoil(output: Any) -> None:
        spoiled.append(True)
        output.response_logprobs[min(1, len(output.response_logprobs) - 1)] = float("nan")

    _spoil_answers(chosen, spoil)


def all_routes_lost() -> None:
    """Let all answers come without their routing, from the step on."""

    def spoil(output: Any) -> None:
        output.routed_experts = None

    _spoil_answers(lambda kwargs: kwargs["global_steps"] >= STEPS["all_routes_lost"], spoil)


def encoded_otherwise() -> None:
    """Let the first token of one answer to each prompt of the step be another: the same ones in every run."""

    def chosen(kwargs: Kwargs) -> bool:
        return kwargs["session_id"] == 1 and kwargs["global_steps"] == STEPS["encoded_otherwise"]

    def spoil(output: Any) -> None:
        output.response_ids[0] = 3 + (output.response_ids[0] + 1) % 10

    _spoil_answers(chosen, spoil)


def nothing_finite() -> None:
    """Let the first log-probability of each answer of the step be not a number."""

    def spoil(output: Any) -> None:
        output.response_logprobs[0] = float("nan")

    _spoil_answers(lambda kwargs: kwargs["global_steps"] == STEPS["nothing_finite"], spoil)


def moved_temperature() -> None:
    """Let the agent loop ask for another temperature than it was given, from the step on."""

    def change(module: Any) -> None:
        original = module.SeededSingleTurn.run

        async def run(self: Any, sampling_params: Kwargs, **kwargs: Any) -> Any:
            if kwargs["global_steps"] >= STEPS["moved_temperature"]:
                sampling_params = {**sampling_params, "temperature": 0.7}
            return await original(self, sampling_params, **kwargs)

        module.SeededSingleTurn.run = run

    AfterImport("tests.peers.verl.cpu.agent_loop", change)


def garbled_weights() -> None:
    """Let a tensor in vLLM's worker be far too large after the update that follows the step; the next update mends it."""

    def change(module: Any) -> None:
        extension = module.vLLMColocateWorkerExtension
        original = extension.update_weights_from_ipc
        calls: list[bool] = []

        @functools.wraps(original)
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            calls.append(True)
            if len(calls) - 1 == STEPS["garbled_weights"]:
                weight = dict(self.model_runner.model.named_parameters())["model.layers.0.mlp.down_proj.weight"]
                weight.data.mul_(-50)
            return result

        extension.update_weights_from_ipc = update

    AfterImport("verl.workers.rollout.vllm_rollout.utils", change)


def nan_on_one_rank() -> None:
    """Let the loss of the last rank be not a number in the actor's update of the step."""

    def change(module: Any) -> None:
        kind = module.FSDPEngineWithLMHead
        step, batch = kind.optimizer_step, kind.forward_step
        updates: list[bool] = []

        @functools.wraps(step)
        def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            updates.append(True)
            return step(self, *args, **kwargs)

        @functools.wraps(batch)
        def forward_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            loss, output = batch(self, *args, **kwargs)
            present = len(updates) + 1
            if not kwargs["forward_only"] and self.rank == 1 and present == STEPS["nan_on_one_rank"]:
                loss = loss * float("nan")
            return loss, output

        kind.optimizer_step, kind.forward_step = optimizer_step, forward_step

    AfterImport("verl.workers.engine.fsdp.transformer_impl", change)


def full_disk() -> None:
    """Let no file of this package be written from one step until another: not its log, evidence or part of checkpoints."""
    filled = contextlib.ExitStack()

    def change(module: Any) -> None:
        written = module.MismatchTrainer._compute_old_log_prob

        @functools.wraps(written)
        def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
            first, last = ALL_STEPS["full_disk"]
            if self.global_steps == first:
                fill()
            if self.global_steps == last:
                filled.close()
            return written(self, *args, **kwargs)

        module.MismatchTrainer._compute_old_log_prob = compute

    def fill() -> None:
        from mismatch_ext import files

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        write = os.write

        def write_elsewhere(fd: int, data: bytes) -> int:
            if "/mismatch/metrics-" in os.readlink(f"/proc/self/fd/{fd}"):
                full()
            return write(fd, data)

        filled.enter_context(mock.patch.object(os, "write", write_elsewhere))
        filled.enter_context(mock.patch.object(files, "_replace", full))

    AfterImport("mismatch_ext.adapters.verl.driver.trainer", change)


def stale_weights() -> None:
    """Let vLLM's worker receive the weights after the step as always, and load none of them."""

    def change(module: Any) -> None:
        extension = module.vLLMColocateWorkerExtension
        original = extension.update_weights_from_ipc
        calls = []

        @functools.wraps(original)
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(True)
            if len(calls) == STEPS["stale_weights"] + 1:
                self._update_weights = lambda *args, **kwargs: None
            try:
                return original(self, *args, **kwargs)
            finally:
                vars(self).pop("_update_weights", None)

        extension.update_weights_from_ipc = update

    AfterImport("verl.workers.rollout.vllm_rollout.utils", change)


def lost_tensor() -> None:
    """Let vLLM's worker load all tensors but one after the step, and after every later one."""

    def change(module: Any) -> None:
        extension = module.vLLMColocateWorkerExtension
        receive, load = extension.update_weights_from_ipc, extension._update_weights
        updates = []

        @functools.wraps(receive)
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            updates.append(True)
            return receive(self, *args, **kwargs)

        @functools.wraps(load)
        def load_most(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
            late = len(updates) > STEPS["lost_tensor"]
            kept = [(name, values) for name, values in weights if not (late and name == LOST)]
            return load(self, kept, *args, **kwargs)

        extension.update_weights_from_ipc, extension._update_weights = update, load_most

    AfterImport("verl.workers.rollout.vllm_rollout.utils", change)


def null_logprob() -> None:
    """Let the second token of one of SGLang's answers come without its log-probability, as one that is not a number does."""
    sent: list[int] = []  # stamps of the weights, of which those that sample in a step are of the step before

    def listen(module: Any) -> None:
        original = module.SGLangHttpServer.set_global_steps

        @functools.wraps(original)
        async def set_global_steps(self: Any, global_steps: int) -> None:
            sent.append(global_steps)
            await original(self, global_steps)

        module.SGLangHttpServer.set_global_steps = set_global_steps

    def change(module: Any) -> None:
        original = module.TokenizerManager.generate_request
        spoiled: list[bool] = []

        @functools.wraps(original)
        async def generate_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            probe = str(request.rid).startswith("mismatch-probe")  # of the weights, and of the decode
            late = not probe and max(sent, default=0) >= STEPS["null_logprob"] - 1
            async for output in original(self, request, *args, **kwargs):
                logprobs = output["meta_info"].get("output_token_logprobs") or []
                if late and len(logprobs) > 1 and not spoiled:
                    spoiled.append(True)
                    logprobs[1] = (None, *logprobs[1][1:])
                yield output

        module.TokenizerManager.generate_request = generate_request

    AfterImport("sglang.srt.managers.tokenizer_manager", change)
    AfterImport("verl.workers.rollout.sglang_rollout.async_sglang_server", listen)


FAULTS = {
    fault.__name__: fault
    for fault in (
        no_plugin_in_the_worker,
        no_plugin_in_the_rollout,
        nonfinite_logprob,
        all_routes_lost,
        encoded_otherwise,
        nothing_finite,
        moved_temperature,
        garbled_weights,
        nan_on_one_rank,
        full_disk,
        stale_weights,
        lost_tensor,
        null_logprob,
    )
}

for _name in STEPS:
    FAULTS[_name]()
