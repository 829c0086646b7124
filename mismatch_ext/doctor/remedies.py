"""What to change in each host for each cause; tests check every flag and key against the installed host."""

from __future__ import annotations

from dataclasses import dataclass, replace

HOSTS = ("trl", "verl", "vllm", "sglang")
_ROLLOUT = "actor_rollout_ref.rollout."


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Lines to change.

    Args:
        trl: Fields of the GRPO config; "" if there is nothing to change in TRL.
        verl: Overrides of `main_ppo`.
        vllm: Flags of `vllm serve`; engine flags are also arguments of `LLM`.
        sglang: Flags of `sglang.launch_server`.
    """

    trl: str = ""
    verl: str = ""
    vllm: str = ""
    sglang: str = ""


# Written as a comment, so that the line stays valid in the file.
_MASKS = "# or keep it, with a top_k, and set mismatch: {sampling_mask: {}}"

_MODEL = Remedy(
    trl="give trainer and engine the same checkpoint folder",
    verl="leave out what overrides actor_rollout_ref.model.override_config, and hf_overrides in rollout.engine_kwargs",
    vllm="leave out --hf-overrides, and serve the trainer's own folder",
    sglang="leave out --json-model-override-args, and serve the trainer's own folder",
)
_WEIGHTS = Remedy(
    trl="mismatch: {monitor: {weight_sync: error}}",
    verl="+mismatch.monitor.weight_sync=error",
    vllm="send the trainer's weights, then reset the prefix cache",
    sglang="send the trainer's weights, then flush the cache",
)
_ADAPTER = Remedy(
    trl="mismatch: {monitor: {weight_sync: error}}",
    verl="+mismatch.monitor.weight_sync=error",
    vllm="--enable-lora --lora-modules NAME=FOLDER, and NAME for the model in the requests; or serve the merged weights",
    sglang="--enable-lora --lora-paths NAME=FOLDER, and NAME for lora_path in the requests; or serve the merged weights",
)
_QUANTISED = Remedy(
    verl=f"{_ROLLOUT}quantization=null",
    vllm="leave out --quantization, and serve unquantised weights",
    sglang="leave out --quantization, and serve unquantised weights",
)
_PENALTY = Remedy(
    trl="repetition_penalty: 1.0, and no penalty in generation_kwargs",
    vllm="--generation-config vllm, and no penalty in the requests",
    sglang="--sampling-defaults openai, and no penalty in the requests",
)
_BIAS = Remedy(
    trl="no logit_bias, bad_words or allowed_token_ids in generation_kwargs",
    vllm="no logit_bias, bad_words or allowed_token_ids in the requests",
    sglang="no logit_bias in the requests, and no grammar",
)
_PROMPT = Remedy(
    trl="send token ids, and no template or special token twice",
    vllm="send prompt_token_ids, without truncate_prompt_tokens",
    sglang="send input_ids",
)
_DTYPE = Remedy(
    trl="mismatch: {precision: {dtype: float16}}",
    verl="+mismatch.precision.dtype=float16",
    vllm="--dtype float16",
    sglang="--dtype float16",
)

REMEDIES: dict[str, Remedy] = {
    "rounding": _DTYPE,
    "trainer_dtype": _DTYPE,
    "layout": Remedy(
        trl="give the model position_ids beside the attention mask, or pad prompts on the right",
        verl="actor_rollout_ref.model.use_remove_padding=true",
    ),
    "head_dtype": Remedy(
        trl="cast_lm_head_to_fp32: true",
        verl=f"""+{_ROLLOUT}engine_kwargs.vllm.hf_overrides.head_dtype=float32""",
        vllm="""--hf-overrides '{"head_dtype": "float32"}', where the trainer's head is in float32""",
        sglang="--enable-fp32-lm-head, where the trainer's head is in float32",
    ),
    "decode_path": Remedy(
        verl=f"{_ROLLOUT}enforce_eager=true",
        vllm="--enforce-eager, VLLM_BATCH_INVARIANT=1, and reset the prefix cache after weights are sent",
        sglang="--enable-deterministic-inference, and flush the cache after weights are sent",
    ),
    "routes": Remedy(
        trl="mismatch: {routing: {mode: R3}}",
        verl="+mismatch.routing.mode=R3",
        vllm="--enable-return-routed-experts",
        sglang="--enable-return-routed-experts",
    ),
    "temperature": Remedy(
        trl="temperature: 1.0",
        verl=f"{_ROLLOUT}temperature=1.0",
        vllm="--logprobs-mode processed_logprobs, and the trainer's temperature in the requests",
        sglang="the trainer's temperature in sampling_params",
    ),
    "raw_logprobs": Remedy(
        verl=f"{_ROLLOUT}logprobs_mode=processed_logprobs",
        vllm="--logprobs-mode processed_logprobs",
        sglang="unset SGLANG_RETURN_ORIGINAL_LOGPROB",
    ),
    "top_p": Remedy(
        trl=f"top_p: 1.0  {_MASKS}",
        verl=f"{_ROLLOUT}top_p=1",
        vllm="--generation-config vllm, and top_p 1 in the requests",
        sglang="--sampling-defaults openai, and top_p 1 in the requests",
    ),
    "top_k": Remedy(
        trl="top_k: 0  # or keep it, and set mismatch: {sampling_mask: {}}",
        verl=f"{_ROLLOUT}top_k=-1",
        vllm="--generation-config vllm, and top_k -1 in the requests",
        sglang="--sampling-defaults openai, and top_k -1 in the requests",
    ),
    "min_p": Remedy(
        trl=f"min_p: null  {_MASKS}",
        vllm="--generation-config vllm, and min_p 0 in the requests",
        sglang="--sampling-defaults openai, and min_p 0 in the requests",
    ),
    "repetition_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": _BIAS,
    "bad_words": _BIAS,
    "min_tokens": Remedy(
        trl="no min_tokens in generation_kwargs",
        vllm="no min_tokens in the requests",
        sglang="no min_new_tokens in the requests",
    ),
    "kv_fp8": Remedy(
        verl=f"+{_ROLLOUT}engine_kwargs.vllm.kv_cache_dtype=auto",
        vllm="--kv-cache-dtype auto",
        sglang="--kv-cache-dtype auto",
    ),
    "kv_fp8_truncated": Remedy(
        verl=f"+{_ROLLOUT}engine_kwargs.vllm.kv_cache_dtype=auto",
        vllm="--kv-cache-dtype auto",
        sglang="--kv-cache-dtype auto",
    ),
    "weights_int8": _QUANTISED,
    "weights_fp8": _QUANTISED,
    "weights_int4": _QUANTISED,
    "activations_int8": _QUANTISED,
    "adapter_not_applied": _ADAPTER,
    "stale_weights": _WEIGHTS,
    "stale_layer": _WEIGHTS,
    "head_tied": _MODEL,
    "other_model": Remedy(
        trl="give trainer and engine the same checkpoint folder",
        verl="+mismatch.monitor.weight_sync=error",
        vllm="serve the trainer's own folder, or send its weights and reset the prefix cache",
        sglang="serve the trainer's own folder, or send its weights and flush the cache",
    ),
    "rope_theta": _MODEL,
    "rope_scale": _MODEL,
    "rope_yarn": _MODEL,
    "partial_rotary": _MODEL,
    "norm_eps": _MODEL,
    "qk_norm_eps": _MODEL,
    "sliding_window": _MODEL,
    "attention_scale": _MODEL,
    "attention_softcap": _MODEL,
    "softcap": _MODEL,
    "logit_scale": _MODEL,
    "padded_vocabulary": _MODEL,
    "expert_scale": _MODEL,
    "expert_norm": _MODEL,
    "experts_per_token": _MODEL,
    "extra_token": _PROMPT,
    "missing_first": _PROMPT,
    "missing_last": _PROMPT,
    "missing_token": _PROMPT,
    "truncated_prompt": _PROMPT,
    "extra_last": _PROMPT,
    "logits_reported": Remedy(
        verl=f"{_ROLLOUT}logprobs_mode=processed_logprobs",
        vllm="--logprobs-mode processed_logprobs",
    ),
    "shifted": Remedy(
        trl="align the log-probabilities with the tokens that were sampled",
        vllm="take logprobs of the completion, token by token",
        sglang="take output_token_logprobs, token by token",
    ),
}


def remedy(key: str, temperature: float = 1.0, *, engine_dtype: str = "", trainer_dtype: str = "") -> Remedy:
    """Return what to change for a cause; an empty remedy for a cause that a caller added.

    Args:
        key: Key of the cause.
        temperature: The trainer's temperature.
        engine_dtype: PyTorch's name of the dtype that the engine computes in; "" if unknown.
        trainer_dtype: The same for the trainer.
    """
    found = REMEDIES.get(key, Remedy())
    if found is _DTYPE:
        # Do not advise what is already set.
        if engine_dtype == "float16":
            found = replace(found, vllm="", sglang="")
        if trainer_dtype == "float16":
            found = replace(found, trl="", verl="")
    if key != "temperature":
        return found
    return replace(found, trl=f"temperature: {temperature:g}", verl=f"{_ROLLOUT}temperature={temperature:g}")
