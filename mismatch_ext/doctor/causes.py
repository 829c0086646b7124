"""What a cause is, and what to change in each host: a cause is one row here, in `logits.py` or in the adapter of transformers.

Tests check every flag and key of a remedy against the installed host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from mismatch_ext.doctor.sample import Floats

HOSTS = ("trl", "verl", "vllm", "sglang")
_ROLLOUT = "actor_rollout_ref.rollout."
# Written as a comment, so that the line stays valid in the file.
_MASKS = "# or keep it, with a top_k, and set mismatch: {sampling_mask: {}}"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Lines to change; "" where there is nothing to change in a host."""

    trl: str = ""  # fields of the GRPO config
    verl: str = ""  # overrides of `main_ppo`
    vllm: str = ""  # flags of `vllm serve`; engine flags are also arguments of `LLM`
    sglang: str = ""  # flags of `sglang.launch_server`


REMEDIES = {
    "dtype": Remedy(
        trl="mismatch: {precision: {dtype: float16}}",
        verl="+mismatch.precision.dtype=float16",
        vllm="--dtype float16",
        sglang="--dtype float16",
    ),
    "engine_grid": Remedy(
        trl="bf16: true  # or mismatch: {precision: {dtype: float16}}",
        verl="+mismatch.precision.dtype=bfloat16",
        vllm="--dtype float32",
        sglang="--dtype float32",
    ),
    "layout": Remedy(
        trl="give the model position_ids beside the attention mask, or pad prompts on the right",
    ),
    "packed": Remedy(verl="actor_rollout_ref.model.use_remove_padding=false"),
    "dropout": Remedy(
        trl="disable_dropout: true, and model_init_kwargs: {attention_dropout: 0.0}, which the first does not reach",
        verl="+actor_rollout_ref.model.override_config.attention_dropout=0",
    ),
    "head_dtype": Remedy(
        trl="cast_lm_head_to_fp32: true",
        verl=f"+{_ROLLOUT}engine_kwargs.vllm.hf_overrides.head_dtype=float32",
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
    "router": Remedy(
        vllm="keep the router's gate and its correction bias in float32; R3 hides this in the loss and does not mend it",
        sglang="keep the router's gate and its correction bias in float32; R3 hides this in the loss and does not mend it",
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
    "penalty": Remedy(
        trl="repetition_penalty: 1.0, and no penalty in generation_kwargs",
        vllm="--generation-config vllm, and no penalty in the requests",
        sglang="--sampling-defaults openai, and no penalty in the requests",
    ),
    "bias": Remedy(
        trl="no logit_bias, bad_words or allowed_token_ids in generation_kwargs",
        vllm="no logit_bias, bad_words or allowed_token_ids in the requests",
        sglang="no logit_bias in the requests, and no grammar",
    ),
    "min_tokens": Remedy(
        trl="no min_tokens in generation_kwargs",
        vllm="no min_tokens in the requests",
        sglang="no min_new_tokens in the requests",
    ),
    "cache": Remedy(
        verl=f"+{_ROLLOUT}engine_kwargs.vllm.kv_cache_dtype=auto",
        vllm="--kv-cache-dtype auto",
        sglang="--kv-cache-dtype auto",
    ),
    "quantization": Remedy(
        verl=f"{_ROLLOUT}quantization=null",
        vllm="leave out --quantization, and serve unquantised weights",
        sglang="leave out --quantization, and serve unquantised weights",
    ),
    "adapter": Remedy(
        trl="mismatch: {monitor: {weight_sync: error}}",
        verl="+mismatch.monitor.weight_sync=error",
        vllm="--enable-lora --lora-modules NAME=FOLDER, and NAME for the model in the requests; or serve the merged weights",
        sglang="--enable-lora --lora-paths NAME=FOLDER, and NAME for lora_path in the requests; or serve the merged weights",
    ),
    "weights": Remedy(
        trl="mismatch: {monitor: {weight_sync: error}}",
        verl="+mismatch.monitor.weight_sync=error",
        vllm="send the trainer's weights, then reset the prefix cache",
        sglang="send the trainer's weights, then flush the cache",
    ),
    "other_model": Remedy(
        trl="give trainer and engine the same checkpoint folder",
        verl="+mismatch.monitor.weight_sync=error",
        vllm="serve the trainer's own folder, or send its weights and reset the prefix cache",
        sglang="serve the trainer's own folder, or send its weights and flush the cache",
    ),
    "model": Remedy(
        trl="give trainer and engine the same checkpoint folder",
        verl="leave out what overrides actor_rollout_ref.model.override_config, and hf_overrides in rollout.engine_kwargs",
        vllm="leave out --hf-overrides, and serve the trainer's own folder",
        sglang="leave out --json-model-override-args, and serve the trainer's own folder",
    ),
    "prompt": Remedy(
        trl="send token ids, and no template or special token twice",
        vllm="send prompt_token_ids, without truncate_prompt_tokens",
        sglang="send input_ids",
    ),
    "logits_reported": Remedy(
        verl=f"{_ROLLOUT}logprobs_mode=processed_logprobs",
        vllm="--logprobs-mode processed_logprobs",
    ),
    "mask": Remedy(
        trl="build the mask of tool tokens from the same token ids that are trained on",
        verl="set response_mask to 1 for the tokens of the policy alone, in your agent loop",
        vllm="count the sampled tokens by the token_ids of the completion",
        sglang="count the sampled tokens by output_ids",
    ),
    "shifted": Remedy(
        trl="align the log-probabilities with the tokens that were sampled",
        vllm="take logprobs of the completion, token by token",
        sglang="take output_token_logprobs, token by token",
    ),
}


def remedy(name: str, temperature: float = 1.0, *, engine_dtype: str = "", trainer_dtype: str = "") -> Remedy:
    """Return the remedy of a name for the trainer's temperature and both dtypes, "" if unknown; an empty one if there is none."""
    lines = asdict(REMEDIES.get(name, Remedy()))
    if name == "temperature":
        lines |= {"trl": f"temperature: {temperature:g}", "verl": f"{_ROLLOUT}temperature={temperature:g}"}
    if name == "dtype":
        # Do not advise what is already set.
        lines |= {"vllm": "", "sglang": ""} if engine_dtype == "float16" else {}
        lines |= {"trl": "", "verl": ""} if trainer_dtype == "float16" else {}
    return Remedy(**lines)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cause:
    """Something that an engine may do differently from the trainer."""

    key: str
    family: str  # of causes that resemble each other: sampling, reporting, config, weights, cache, prompt or experts
    said: str  # a sentence; `{x}` stands for the parameter
    # Maps a parameter to the log-probabilities `[N]` that the oracle would give with this cause; -inf for tokens that it makes
    # impossible.
    predict: Callable[[float], Floats]
    remedy: str = ""  # a key of `REMEDIES`; "" if that is the cause's own key
    needs: bool = True  # whether model and sample have what this cause changes; otherwise it is not tried
    grid: tuple[float, ...] = (1.0,)  # parameters to try; positive if they are refined
    # Steps of refinement between the neighbours on the grid; more are made while the tokens tell the parameters apart. 0 for
    # parameters that are counts or indices of a list.
    steps: int = 0
    neutral: float | None = None  # the parameter at which nothing changes
    names: tuple[str, ...] = ()  # if the parameter is an index, the texts that the sentence shows instead
    # Like `predict`, but only for some of the fitted responses, with NaN for all other tokens: chooses the parameter when a
    # prediction is expensive.
    screen: Callable[[float], Floats] | None = None

    def sentence(self, x: float) -> str:
        """Return the sentence with a parameter."""
        return self.said.format(x=self.names[int(x)] if self.names else f"{x:.3g}")
