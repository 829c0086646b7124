#!/usr/bin/env bash
# GRPO with verl, vLLM and the `mismatch:` block, on the GPUs of one node. Arguments override examples/configs/verl_grpo.yaml:
#
#     examples/verl_grpo.sh actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B +mismatch.routing.mode=R3
#
# An installed mismatch-ext is found by verl itself. Named here as well, one that cannot be loaded is an error and not a line in
# a debug log: with the block in a file, verl would otherwise train without it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export VERL_USE_EXTERNAL_MODULES="${VERL_USE_EXTERNAL_MODULES:+$VERL_USE_EXTERNAL_MODULES,}mismatch_ext.adapters.verl"
exec "${PYTHON:-python3}" -m verl.trainer.main_ppo --config-path="$here/configs" --config-name=verl_grpo "$@"
