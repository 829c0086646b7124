#!/usr/bin/env bash
# GRPO of a mixture of experts with routing replay and correction, in any of verl's trainer modes. No file of verl is changed.
#
#     examples/verl_moe.sh sync                # 8 GPUs, which sample and train in turns
#     examples/verl_moe.sh colocate_async      # 8 GPUs; what an update interrupts goes on after it, with newer weights
#     examples/verl_moe.sh separate_async      # 8 + 8: one node samples while the other trains, four updates to a weight update
#
# Arguments override what is below:  MODEL=... TRAIN=... VAL=... examples/verl_moe.sh sync trainer.total_training_steps=100
# Data as verl's examples/data_preprocess/gsm8k.py writes it. verl 0.9.1.
set -euo pipefail
mode=${1:?sync, colocate_async or separate_async}
shift
case $mode in
sync) settings=() ;;
colocate_async) settings=(trainer.v1.colocate_async.num_warmup_batches=2) ;;
separate_async)
    settings=(
        trainer.v1.separate_async.num_warmup_batches=1
        trainer.v1.separate_async.parameter_sync_step=4
        actor_rollout_ref.hybrid_engine=False
        actor_rollout_ref.rollout.nnodes=1
        actor_rollout_ref.rollout.n_gpus_per_node=8
        actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
    ) ;;
*) echo "verl_moe.sh: $mode is none of sync, colocate_async, separate_async" >&2; exit 2 ;;
esac
# A plugin that cannot be loaded is an error then, and not a line in a debug log.
export VERL_USE_EXTERNAL_MODULES="${VERL_USE_EXTERNAL_MODULES:+$VERL_USE_EXTERNAL_MODULES,}mismatch_ext.adapters.verl"
exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode="$mode" \
    ${settings[@]+"${settings[@]}"} \
    algorithm.adv_estimator=grpo \
    data.train_files="${TRAIN:-$HOME/data/gsm8k/train.parquet}" \
    data.val_files="${VAL:-$HOME/data/gsm8k/test.parquet}" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=8192 \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-30B-A3B}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.ref.strategy=fsdp2 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    'trainer.logger=[console,file]' \
    trainer.project_name=mismatch \
    trainer.experiment_name="$mode" \
    '+mismatch.routing={mode:R3,measured:0.1}' \
    +mismatch.correction.preset=icepop \
    +mismatch.lr.trigger=response_length \
    "$@"
