"""What this package relies on in vLLM in this process; a server is asked in its requests instead."""

from __future__ import annotations

from mismatch_ext.seams import Claim, Seam, exists

_SOURCE = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/"
_ENGINE = "vllm.entrypoints.llm:LLM"


def _fields(target: str, *names: str) -> tuple[Claim, ...]:
    return tuple(exists(f"{target}.{name}") for name in names)


SEAMS = (
    Seam(
        name="vllm/generation",
        features=("monitor",),
        what="sampling, and keeping what it returns",
        claims=(
            exists(f"{_ENGINE}.generate", "prompts", "sampling_params"),
            *_fields("vllm.outputs:CompletionOutput", "token_ids", "finish_reason", "logprobs"),
        ),
        checked="records are compared with prompts, tokens and log-probabilities of each request",
        upstream=_SOURCE + "entrypoints/llm.py",
        where=("trl",),
    ),
    Seam(
        name="vllm/configuration",
        features=("monitor",),
        what="reading back what the engine computes with",
        claims=(
            *_fields("vllm.config.vllm:VllmConfig", "model_config", "cache_config", "device_config"),
            *_fields("vllm.config.model:ModelConfig", "dtype", "logprobs_mode", "quantization"),
            *_fields("vllm.config.cache:CacheConfig", "cache_dtype"),
            *_fields("vllm.config.device:DeviceConfig", "device_type"),
        ),
        checked="the audit compares what was read with the trainer's dtypes",
        upstream=_SOURCE + "config/vllm.py",
    ),
    Seam(
        name="vllm/arguments",
        features=("monitor",),
        what="starting an engine with a run's settings, and sampling with them",
        claims=(
            *_fields("vllm.engine.arg_utils:EngineArgs", "logprobs_mode", "generation_config", "disable_log_stats"),
            *_fields("vllm.sampling_params:SamplingParams", "n", "logprobs", "max_tokens", "detokenize"),
        ),
        checked="the engine's configuration is read back",
        upstream=_SOURCE + "engine/arg_utils.py",
    ),
    Seam(
        name="vllm/prompt_logprobs",
        features=("monitor.weight_sync",),
        what="scoring the probe tokens that prove a weight update, and decoding after them",
        claims=(
            *_fields("vllm.sampling_params:SamplingParams", "prompt_logprobs", "seed", "ignore_eos"),
            exists("vllm.logprobs:Logprob.logprob"),
        ),
        checked="the log-probabilities are compared with the trainer's, token by token",
        upstream=_SOURCE + "sampling_params.py",
        where=("trl",),
    ),
    Seam(
        name="vllm/prefix_cache",
        features=("monitor.weight_sync", "routing.R3"),
        what="forgetting what was cached of the weights before",
        claims=(exists(f"{_ENGINE}.reset_prefix_cache"),),
        checked="vLLM's answer says whether it has forgotten",
        upstream=_SOURCE + "entrypoints/llm.py",
        where=("trl",),
    ),
    Seam(
        name="vllm/reload_weights",
        features=("monitor",),
        what="updating the weights of a CPU engine layer by layer",
        claims=(exists("vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights", "weights_iterator"),),
        checked="probe tokens are scored after each update",
        upstream=_SOURCE + "v1/worker/gpu_model_runner.py",
        where=("trl", "cpu"),
    ),
    Seam(
        name="vllm/routes",
        features=("routing.R3",),
        what="asking the engine to record routes, and taking those of each completion",
        claims=(
            exists("vllm.engine.arg_utils:EngineArgs.enable_return_routed_experts"),
            exists("vllm.outputs:CompletionOutput.routed_experts"),
        ),
        checked="the flag is read back, and each completion's routes must have a row for each token",
        upstream=_SOURCE + "outputs.py",
    ),
)
