"""A replay buffer of verl whose batches have one order, whichever answer came first."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class _Ordered:
    """Orders a batch by prompt and answer."""

    prompt_global_steps: Any

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> Any:
        prompts = {uid: place for place, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(key: str) -> tuple[int, ...]:
            uid, *numbers = key.split("_")
            return (prompts[uid], *map(int, numbers))

        ordered = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=place)}
        return super()._materialize_batch(  # type: ignore[misc]  # of the buffer beside it
            partition_id, selected_prompt_uids, ordered
        )


class OrderedReplayBuffer(_Ordered, ReplayBuffer):
    """verl's own for synchronous training, in order; it also looks more often for what is new."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.2)


class PromptReplayBuffer(ReplayBufferAsync):
    """verl's own for asynchronous training, which looks often: answers are still in flight when a batch is taken."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.05)


class OrderedPromptReplayBuffer(_Ordered, PromptReplayBuffer):
    """The same, in order."""
