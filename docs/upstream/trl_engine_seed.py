"""TRL gives its colocated vLLM the process's number as seed: runs with other `seed`s sample the same answers to equal prompts."""

import os
from types import SimpleNamespace
from unittest.mock import patch

from torch import nn
from transformers import set_seed
from trl.generation.vllm_generation import VLLMGeneration

PEER = "trl"
REPORTED = "not reported"
WORKAROUND = "none of ours: wrap `trl.generation.vllm_generation.LLM` so that it gets your seed"
EXPECTED = [1, 2]


class Started(Exception):
    """vLLM would start now."""


def started_with(engine) -> int:
    """Return the seed with which TRL would start vLLM."""
    model, process = nn.Linear(1, 1), SimpleNamespace(process_index=0, local_process_index=0, num_processes=1)
    model.name_or_path = "a model"
    host = SimpleNamespace(
        mode="colocate", model=model, accelerator=process, tensor_parallel_size=1, gpu_memory_utilization=0.5,
        max_model_length=8, max_num_seqs=1, enable_sleep_mode=False, model_impl="vllm", trust_remote_code=False,
    )  # fmt: skip
    try:
        with patch("trl.generation.vllm_generation.LLM", engine), patch.dict(os.environ):
            VLLMGeneration._init_vllm(host)
    except Started as stopped:
        return stopped.args[0]


def start(**arguments):
    raise Started(arguments["seed"])


def seen(engine_of=lambda seed: start) -> list[int]:
    """Return the engine's seeds of two runs, with `seed=1` and `seed=2`."""
    found = []
    for seed in (1, 2):
        set_seed(seed)
        found.append(started_with(engine_of(seed)))
    return found


def with_workaround() -> list[int]:
    return seen(lambda seed: lambda **arguments: start(**{**arguments, "seed": seed}))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
