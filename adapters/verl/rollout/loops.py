"""verl's processes of agent loops, which join the sampling masks of a rollout's turns where the block asks for masks.

verl trains without a rollout that raised. So a rollout without masks goes on with the reason, and the driver raises it.
"""

from __future__ import annotations

from typing import Any

import ray
from mismatch_ext.adapters.verl.block import block_of
from mismatch_ext.adapters.verl.rollout.client import following, present_calls
from mismatch_ext.adapters.verl.rollout.masks import UNKNOWN, with_masks
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from mismatch_ext.sampling_mask import TokenSupport
from mismatch_ext.turns import Calls, Trained, masks_of

# verl hands out the class of a Ray actor, which cannot be derived from.
_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__  # type: ignore[attr-defined]


class MaskedLoops(_Worker):  # type: ignore[misc]
    """Runs in the Ray actors that verl starts for agent loops."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Defined here because Ray pickles an inherited `__init__` by value, and its `super()` would mean a copy of verl's class.
        super().__init__(*args, **kwargs)

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run an agent loop as verl does, and note its calls of the servers."""
        with following():
            return await super()._run_agent_loop(*args, **kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        """Publish what an agent loop returned as verl does, with its masks."""
        block = block_of(
            self.config.actor_rollout_ref
        )  # a user's own manager may be derived from ours in a run without masks
        if not validate and block is not None and block.acting.sampling_mask is not None:
            output = output if isinstance(output, list) else [output]
            add_masks(output, present_calls(), f"{kwargs['uid']}_{kwargs['session_id']}")
        return await super()._agent_loop_postprocess(output, validate, **kwargs)


def add_masks(outputs: list[AgentLoopOutput], calls: Calls, name: str) -> None:
    """Add sampling masks to an agent loop's outputs, or say why one has none.

    Args:
        outputs: What the loop returned, a row of the batch each; changed in place.
        calls: Its calls of the servers.
        name: Beginning of the outputs' keys in verl's TransferQueue.
    """
    for number, output in enumerate(outputs):
        try:
            outputs[number] = with_masks(output, masks_of(f"{name}_{number}", _trained(output), calls))
        except Exception as error:  # noqa: BLE001 - raised here, it would take the rollout out of the batch in silence
            output.extra_fields[UNKNOWN] = f"{type(error).__name__}: {error}"
            # All outputs of an answer need the same fields.
            outputs[number] = with_masks(output, TokenSupport.empty(len(output.response_ids), 1))


def _trained(output: AgentLoopOutput) -> Trained:
    logprobs = output.response_logprobs
    return Trained(
        prompt_ids=tuple(output.prompt_ids),
        response_ids=tuple(output.response_ids),
        response_mask=tuple(map(bool, output.response_mask)),
        rollout_logprobs=None if logprobs is None else tuple(logprobs),
    )


class MaskedLoopManager(AgentLoopManagerTQ):
    """verl's manager of agent loops, with our processes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(MaskedLoops)
