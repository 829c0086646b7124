"""A replay buffer of verl whose batches have one order, whichever answer came first."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class PromptReplayBuffer(ReplayBufferAsync):
    """verl's own for asynchronous training, which looks often: answers are still in flight when a batch is taken."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.05)


class OrderedReplayBuffer(ReplayBuffer):
    """verl's own for synchronous training, ordered by prompt and answer; it also looks more often for what is new."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.2)

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> Any:
        prompts = {uid: place for place, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(key: str) -> tuple[int, ...]:
            uid, *numbers = key.split("_")
            return (prompts[uid], *map(int, numbers))

        ordered = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=place)}
        return super()._materialize_batch(partition_id, selected_prompt_uids, ordered)
