"""Faults in verl's processes, injected where VERL_CPU_FAULT names one. Loaded when Python starts, before verl and vLLM.

A fault of a rollout may strike later than in the first step, `NAME@STEP`: what happened before it is then a run like any other.
Several are separated by commas.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from tests.peers.verl.cpu.after_import import AfterImport, Missing

FAULT = "VERL_CPU_FAULT"
MESSAGE = "injected by VERL_CPU_FAULT"
STEPS = {
    name: int(step or 1)
    for name, _, step in (fault.partition("@") for fault in os.environ.get(FAULT, "").split(","))
    if name
}


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


def no_routed_experts() -> None:
    """Let the engine start without recording its routing, whatever it is asked for."""

    def change(module: Any) -> None:
        arguments = module.AsyncEngineArgs
        original = arguments.create_engine_config

        @functools.wraps(original)
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.enable_return_routed_experts = False
            return original(self, *args, **kwargs)

        arguments.create_engine_config = create_engine_config

    AfterImport("vllm.engine.arg_utils", change)


def _spoil_one_answer(step: int, spoil: Callable[[Any], None]) -> None:
    def change(module: Any) -> None:
        for loop in (module.SeededSingleTurn, module.SeededTools):
            spoil_one_of(loop)

    def spoil_one_of(loop: Any) -> None:
        original = loop.run
        spoiled = []

        async def run(self: Any, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            output = await original(self, sampling_params, **kwargs)
            if kwargs["global_steps"] >= step and kwargs["session_id"] == 1 and not spoiled:
                spoiled.append(True)
                spoil(output)
            return output

        loop.run = run

    AfterImport("tests.peers.verl.cpu.agent_loop", change)


def nonfinite_logprob() -> None:
    """Let one answer's second token have a log-probability that is not a number."""

    def spoil(output: Any) -> None:
        output.response_logprobs[1] = float("nan")

    _spoil_one_answer(STEPS["nonfinite_logprob"], spoil)


def many_turns() -> None:
    """Let every answer be counted as one of two turns, by a client of the servers that keeps no more than verl's own."""

    def change(module: Any) -> None:
        loop = module.SeededSingleTurn
        original = loop.run

        async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = await original(self, *args, **kwargs)
            output.num_turns = 4
            del output.extra_fields["weight_versions"]
            return output

        loop.run = run

    AfterImport("tests.peers.verl.cpu.agent_loop", change)


def lost_routes() -> None:
    """Let one answer come without its routing."""

    def spoil(output: Any) -> None:
        output.routed_experts = None

    _spoil_one_answer(STEPS["lost_routes"], spoil)


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


def between_updates() -> None:
    """Let the driver find a fault in the batch of the step's second local update, when the first has been made."""

    def change(module: Any) -> None:
        from mismatch_ext.errors import RoutingError

        trainer = module.MismatchTrainer
        original = trainer._compute_old_log_prob

        @functools.wraps(original)
        def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.global_steps >= STEPS["between_updates"] and self.local_trigger_step == 1:
                raise RoutingError(f"{MESSAGE}: routes of step {self.global_steps}")
            return original(self, *args, **kwargs)

        trainer._compute_old_log_prob = compute

    AfterImport("mismatch_ext.adapters.verl.driver.trainer", change)


def no_room_for_a_copy() -> None:
    """Let the worker have no memory for the copy of its model on which a batch is examined."""

    def change(module: Any) -> None:
        def copy_of(*_: Any) -> None:
            raise MemoryError(f"{MESSAGE}: no room")

        module.copy_of = copy_of

    AfterImport("mismatch_ext.adapters.verl.worker.doctor", change)


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


def spoiled_turns() -> None:
    """Let three answers to one prompt, of three turns each, be no more what the servers were given and sampled.

    The first one's turn is tokenised anew before the next is asked for, as a chat template may that renders it again; of the
    second one a turn is dropped; and the third one's second turn is of newer weights than its first.
    """
    prompts: list[str] = []
    kind: ContextVar[int | None] = ContextVar("kind", default=None)
    asked: ContextVar[list[bool]] = ContextVar("asked")

    def change(module: Any) -> None:
        from verl.workers.rollout.llm_server import LLMServerClient

        loop = module.SeededTools
        run, turn, answer = loop.run, loop._handle_generating_state, LLMServerClient.generate

        async def spoiled_run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs["global_steps"] >= STEPS["spoiled_turns"]:
                prompts.append(kwargs["uid"])
                kind.set(kwargs["session_id"] if kwargs["uid"] == prompts[0] else None)
            asked.set([])
            output = await run(self, *args, **kwargs)
            if kind.get() == 1:
                mask = output.response_mask
                second = mask.index(1, mask.index(0))
                third = mask.index(1, mask.index(0, second))
                for of in (output.response_ids, mask, output.response_logprobs):
                    del of[second:third]
            return output

        async def spoiled_turn(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            if kind.get() == 0 and len(asked.get()) == 1:
                place = len(data.prompt_ids) - len(data.response_mask)
                data.prompt_ids = [*data.prompt_ids]
                data.prompt_ids[place] = 4 if data.prompt_ids[place] == 3 else 3
            return await turn(self, data, *args, **kwargs)

        async def spoiled_answer(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = await answer(self, *args, **kwargs)
            asked.get().append(True)
            if kind.get() == 2 and len(asked.get()) > 1:
                for name in ("global_steps", "min_global_steps", "max_global_steps"):
                    output.extra_fields[name] += 1
            return output

        loop.run, loop._handle_generating_state, LLMServerClient.generate = spoiled_run, spoiled_turn, spoiled_answer

    AfterImport("tests.peers.verl.cpu.agent_loop", change)


FAULTS = {
    fault.__name__: fault
    for fault in (
        no_plugin_in_the_worker,
        no_plugin_in_the_rollout,
        no_routed_experts,
        nonfinite_logprob,
        lost_routes,
        stale_weights,
        between_updates,
        many_turns,
        null_logprob,
        spoiled_turns,
        no_room_for_a_copy,
    )
}

for _name in STEPS:
    FAULTS[_name]()
