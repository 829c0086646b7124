"""The places in vLLM that this package relies on."""

from __future__ import annotations

from mismatch_ext.patches.vllm.cpu_routes import CPU_ROUTES

from mismatch_ext.compat import Both, Default, Either, Has, Known, Seam, Takes

_SOURCE = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/"

SEAMS = (
    Seam(
        name="vllm/generation",
        peer="vllm",
        features=("monitor",),
        what="sampling, and keeping what it returns",
        claims=(
            Takes("vllm.entrypoints.llm:LLM.generate", "self", "prompts", "sampling_params", first=True),
            Has("vllm.entrypoints.llm:LLM.llm_engine"),
            Has("vllm.outputs:RequestOutput.outputs"),
            Has("vllm.outputs:RequestOutput.prompt_token_ids"),
            Has("vllm.outputs:CompletionOutput.token_ids"),
            Has("vllm.outputs:CompletionOutput.finish_reason"),
        ),
        upstream=_SOURCE + "entrypoints/llm.py",
        where=("trl",),
    ),
    Seam(
        name="vllm/in_process_runner",
        peer="vllm",
        features=("monitor",),
        what="reading weights, dtypes and KV cache back from the engine",
        claims=(
            Has("vllm.v1.engine.llm_engine:LLMEngine.model_executor"),
            Has("vllm.v1.executor.uniproc_executor:UniProcExecutor.driver_worker"),
            Has("vllm.v1.worker.gpu_worker:Worker.model_runner"),
        ),
        upstream=_SOURCE + "v1/executor/uniproc_executor.py",
        where=("trl",),
    ),
    Seam(
        name="vllm/configuration",
        peer="vllm",
        features=("monitor",),
        what="reading back what the engine computes with",
        claims=(
            Has("vllm.config.vllm:VllmConfig.model_config"),
            Has("vllm.config.vllm:VllmConfig.cache_config"),
            Has("vllm.config.vllm:VllmConfig.device_config"),
            Has("vllm.config.model:ModelConfig.dtype"),
            Has("vllm.config.model:ModelConfig.logprobs_mode"),
            Has("vllm.config.model:ModelConfig.quantization"),
            Has("vllm.config.cache:CacheConfig.cache_dtype"),
            Has("vllm.config.device:DeviceConfig.device_type"),
        ),
        upstream=_SOURCE + "config/vllm.py",
    ),
    Seam(
        name="vllm/engine_dtype",
        peer="vllm",
        features=("precision",),
        what="starting the engine in the dtype that was asked for",
        claims=(Takes("vllm.entrypoints.llm:LLM.__init__", "model", "dtype"),),
        upstream=_SOURCE + "entrypoints/llm.py",
        where=("trl",),
    ),
    Seam(
        name="vllm/doctor",
        peer="vllm",
        features=("monitor",),
        what="starting an engine with a run's settings, and sampling with them, for `mismatch-ext doctor`",
        claims=(
            Has("vllm.engine.arg_utils:EngineArgs.logprobs_mode"),
            Has("vllm.engine.arg_utils:EngineArgs.generation_config"),
            Has("vllm.engine.arg_utils:EngineArgs.disable_log_stats"),
            Has("vllm.engine.arg_utils:EngineArgs.enforce_eager"),
            Has("vllm.sampling_params:SamplingParams.n"),
            Has("vllm.sampling_params:SamplingParams.logprobs"),
        ),
        upstream=_SOURCE + "engine/arg_utils.py",
    ),
    Seam(
        name="vllm/doctor_server",
        peer="vllm",
        features=("monitor",),
        what="requests to a stock server, and its answers, for `mismatch-ext doctor --server`",
        claims=(
            Has("vllm.entrypoints.openai.completion.protocol:CompletionRequest.return_token_ids"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionRequest.prompt_logprobs"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionRequest.logprobs"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice.token_ids"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice.prompt_token_ids"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice.routed_experts"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionLogProbs.token_logprobs"),
        ),
        upstream=_SOURCE + "entrypoints/openai/completion/protocol.py",
    ),
    Seam(
        name="vllm/server_plugin",
        peer="vllm",
        features=("monitor",),
        what="reading a server's workers back, and sending weights in the bodies of requests",
        claims=(
            Has("vllm.v1.worker.worker_base:WorkerBase"),
            Has("vllm.v1.worker.gpu_worker:Worker.model_runner"),
            Takes(
                "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine",
                "name",
                "module_path_or_cls",
                "class_name",
            ),
            Has("vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory._registry"),
            *(
                Has(f"vllm.distributed.weight_transfer.base:WeightTransferEngine.{name}")
                for name in (
                    "start_weight_update",
                    "update_weights",
                    "receive_weights",
                    "finish_weight_update",
                    "parse_update_info",
                )
            ),
            Has("vllm.model_executor.model_loader.reload:initialize_layerwise_reload"),
            Has("vllm.model_executor.model_loader.reload:finalize_layerwise_reload"),
        ),
        upstream=_SOURCE + "distributed/weight_transfer/base.py",
        where=("trl", "server"),
    ),
    Seam(
        name="vllm/server_requests",
        peer="vllm",
        features=("monitor",),
        what="scoring probe tokens by a server, decoding after them, and taking routes from its answers",
        claims=(
            Has("vllm.entrypoints.openai.completion.protocol:CompletionRequest.return_token_ids"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionRequest.logprobs"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionRequest.ignore_eos"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionRequest.seed"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice.token_ids"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionLogProbs.token_logprobs"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionRequest.prompt_logprobs"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice.prompt_logprobs"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice.prompt_token_ids"),
            Has("vllm.entrypoints.openai.completion.protocol:CompletionResponseChoice.routed_experts"),
            Has("vllm.config.vllm:VllmConfig.weight_transfer_config"),
            Has("vllm.config.weight_transfer:WeightTransferConfig.backend"),
            Has("vllm.config.parallel:ParallelConfig.data_parallel_size"),
            Has("vllm.config.device:DeviceConfig.device"),
        ),
        upstream=_SOURCE + "entrypoints/openai/completion/protocol.py",
        where=("trl", "server"),
    ),
    Seam(
        name="vllm/prompt_logprobs",
        peer="vllm",
        features=("monitor.weight_sync",),
        what="scoring the probe tokens that prove a weight update, and decoding after them",
        claims=(
            Has("vllm.sampling_params:SamplingParams.seed"),
            Has("vllm.sampling_params:SamplingParams.ignore_eos"),
            Has("vllm.outputs:CompletionOutput.logprobs"),
            Has("vllm.sampling_params:SamplingParams.prompt_logprobs"),
            Has("vllm.sampling_params:SamplingParams.max_tokens"),
            Has("vllm.sampling_params:SamplingParams.detokenize"),
            Has("vllm.outputs:RequestOutput.prompt_logprobs"),
            Has("vllm.logprobs:Logprob.logprob"),
        ),
        upstream=_SOURCE + "sampling_params.py",
        where=("trl",),
    ),
    Seam(
        name="vllm/prefix_cache",
        peer="vllm",
        features=("monitor.weight_sync", "routing.R3"),
        what="forgetting what was cached of the weights before",
        claims=(Has("vllm.entrypoints.llm:LLM.reset_prefix_cache"),),
        upstream=_SOURCE + "entrypoints/llm.py",
        where=("trl",),
    ),
    Seam(
        name="vllm/reload_weights",
        peer="vllm",
        features=("monitor",),
        what="updating the weights of a CPU engine layer by layer",
        claims=(
            Takes(
                "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",
                "weights_iterator",
                "is_checkpoint_format",
            ),
        ),
        upstream=_SOURCE + "v1/worker/gpu_model_runner.py",
        where=("trl", "cpu"),
    ),
    Seam(
        name="vllm/routing_flag",
        peer="vllm",
        features=("routing.R3",),
        what="asking the engine to record routes, and reading back that it does",
        claims=(
            Has("vllm.engine.arg_utils:EngineArgs.enable_return_routed_experts"),
            Either(
                Has("vllm.config.model:ModelConfig.enable_return_routed_experts"),
                Both(
                    Has("vllm.config.aux_output:AuxOutputConfig.enable_return_routed_experts"),
                    Has("vllm.config.vllm:VllmConfig.aux_output_config"),
                ),
            ),
        ),
        upstream=_SOURCE + "config/aux_output.py",
    ),
    Seam(
        name="vllm/routes",
        peer="vllm",
        features=("routing.R3",),
        what="taking each completion's routes, prompt rows included",
        claims=(
            Has("vllm.outputs:CompletionOutput.routed_experts"),
            Default("vllm.sampling_params:SamplingParams.routed_experts_prompt_start", "0"),
        ),
        upstream=_SOURCE + "outputs.py",
    ),
    Seam(
        name="vllm/cpu_routes",
        peer="vllm",
        features=("routing.R3",),
        what="recording routes on a CPU, where vLLM refuses to",
        claims=(
            Either(
                Has("vllm.config.model:ModelConfig.enable_return_routed_experts"),
                Known(CPU_ROUTES.target, dict.fromkeys(CPU_ROUTES.texts, "0.31.0 and 0.32.0")),
            ),
        ),
        upstream=_SOURCE + "config/vllm.py",
        where=("trl", "cpu"),
    ),
)
