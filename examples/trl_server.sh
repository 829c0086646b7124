#!/usr/bin/env bash
# GRPO with TRL, a vLLM server and the `mismatch:` block. On one GPU the server, with mismatch-ext installed beside vLLM:
#
#     CUDA_VISIBLE_DEVICES=0 examples/trl_server.sh serve Qwen/Qwen3-0.6B --dtype float16
#
# and on others the trainer, which takes TRL's arguments:
#
#     CUDA_VISIBLE_DEVICES=1 examples/trl_server.sh train --model_name_or_path Qwen/Qwen3-0.6B --max_steps 20 \
#         --mismatch '{"precision": {"dtype": "float16"}}'
#
# For R3 the server takes --enable-return-routed-experts as well. Without a GPU: TRANSFER=mismatch_http on the server.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
what=${1:?serve or train}
shift
case $what in
serve)
    # The development endpoints are those by which weights are sent and read back: keep the port from strangers.
    export VLLM_SERVER_DEV_MODE=1
    exec "${PYTHON:-python3}" -c "from vllm.entrypoints.cli.main import main; main()" serve "$@" \
        --logprobs-mode processed_logprobs --weight-transfer-config "{\"backend\": \"${TRANSFER:-nccl}\"}"
    ;;
train)
    exec "${PYTHON:-python3}" "$here/trl_grpo.py" --config "$here/configs/arithmetic.yaml" --vllm_mode server \
        --vllm_server_base_url "${SERVER:-http://127.0.0.1:8000}" "$@"
    ;;
*)
    echo "trl_server.sh: $what is neither serve nor train" >&2
    exit 2
    ;;
esac
