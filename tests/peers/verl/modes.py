"""What a run of verl's asynchronous modes takes on a CPU, after the settings of `main_ppo.py`."""

from __future__ import annotations

from tests.peers.verl.main_ppo import CPU, PROMPTS

# Long answers, of which six are sampled at once and a batch more than is trained on is asked for: some are in flight when a
# batch is taken, and are of several versions of the weights when they end.
IN_FLIGHT = (
    f"trainer.v1.sampler.custom_sampler.path={CPU}/sampler.py",
    "trainer.v1.sampler.custom_sampler.name=PromptReplayBuffer",
    "data.max_response_length=72",
    "actor_rollout_ref.rollout.max_model_len=128",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    "trainer.total_epochs=12",
)

COLOCATE = ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=2", *IN_FLIGHT)
"""One device, whose rollout server is aborted before an update and resumes afterwards."""

IN_TURN = (
    "trainer.v1.sampler.custom_sampler.name=OrderedPromptReplayBuffer",
    "trainer.v1.colocate_async.num_warmup_batches=0",
    "trainer.v1.separate_async.num_warmup_batches=0",
    "trainer.v1.separate_async.parameter_sync_step=1",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    *(
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "data.max_response_length=24",
        "actor_rollout_ref.rollout.max_model_len=64",
    ),
)
"""Either mode with nothing in flight when a batch is taken, whose batches are those of every run."""

UPDATES = 2
"""Local updates between two weight updates."""

SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.num_warmup_batches=1",
    f"trainer.v1.separate_async.parameter_sync_step={UPDATES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // UPDATES}",
    *(f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu=8" for role in ("ref", "rollout")),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.hybrid_engine=False",
    *("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"),
    "++ray_kwargs.ray_init.num_gpus=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=tests.peers.verl.cpu.file_engine",
    *IN_FLIGHT,
)
"""Two devices, and a rollout server that samples while the actor trains, in steps of several updates."""
