"""GRPO by torchtitan: its model, optimizer, schedule and loss, with the `mismatch:` block and vLLM (or SGLang) for the rollouts.

    python examples/third/torchtitan_grpo.py --steps 5

A small Qwen3 learns to add. torchtitan computes it by its own model code, in float16 with a loss scaler (`precision`); what is
left of the gap to the engine is weighed inside torchtitan's own GRPO loss (`correction`); the policy is kept near the model that
it began as (`kl`), at a rate led by the length of its responses (`lr`). Every weight update goes through torchtitan's own
conversion to the names of transformers, and is verified; alarms watch the run (`monitor`).

What a trainer has to say of itself is between the marks: a function that maps tokens to logits, and the names of its weights.
"""

from __future__ import annotations

import os

# Before an engine is imported: vLLM with a small KV cache, SGLang's kernels in one thread each.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
)  # as torchtitan sets it, once torch is there with a warning

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Run as a file, Python would look for modules in this folder only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from mismatch_ext.adapters.transformers import TrainedModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torchtitan.components.loss import compute_logprobs
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.experiments.rl.losses import GRPOLoss
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from tqdm import tqdm
from transformers import AutoTokenizer

from examples.arithmetic.shipped import shipped_model
from examples.arithmetic.task import FAMILIAR_DIGITS, Row, make_dataset, reward
from mismatch_ext import MismatchConfig, Run, SamplingSettings

BLOCK = {
    "precision": {"dtype": "float16"},
    "correction": {"preset": "tis"},
    "kl": {"coef": 0.02},
    "lr": {},
    "monitor": {},
}
SAMPLES, LEARNING_RATE = 8, 5e-5
ARGUMENTS = {"vllm": {"max_model_len": 160, "seed": 0}, "sglang": {"random_seed": 0}}
SHOWN = ("reward", "length", "learning_rate", "mismatch/k3_kl", "mismatch/weight_sync_gap")


def titan_config(checkpoint: Path) -> Qwen3Model.Config:
    """Return torchtitan's configuration of a dense Qwen3 checkpoint.

    Its registry has those of the published sizes; attention is torch's own here, since rows begin at position 0 and are padded on
    the right: torchtitan's flex and varlen attention, which are for packed rows, train on GPUs only.
    """
    said = json.loads((checkpoint / "config.json").read_text())
    if said["model_type"] != "qwen3":
        # Not only for brevity: torchtitan computes experts in bfloat16 whatever dtype is asked for (GroupedExperts.forward).
        raise SystemExit(f"{checkpoint} is a {said['model_type']}; this example is for dense models: qwen3.")
    width, head, given = said["hidden_size"], said["head_dim"], {"weight": skip_param_init}

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=said["rms_norm_eps"], param_init=given)

    def layer() -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(width),
            ffn_norm=norm(width),
            attention=make_gqa_config(
                dim=width,
                n_heads=said["num_attention_heads"],
                n_kv_heads=said["num_key_value_heads"],
                head_dim=head,
                wqkv_param_init=given,
                wo_param_init=given,
                inner_attention=ScaledDotProductAttention.Config(),
                rope=CosSinRoPE.Config(
                    dim=head,
                    max_seq_len=said["max_position_embeddings"],
                    theta=said["rope_parameters"]["rope_theta"],
                ),
                qk_norm=norm(head),
            ),
            feed_forward=make_ffn_config(
                dim=width, hidden_dim=said["intermediate_size"], w1_param_init=given, w2w3_param_init=given
            ),
        )

    size = said["vocab_size"]
    return Qwen3Model.Config(
        dim=width,
        vocab_size=size,
        norm=norm(width),
        tok_embeddings=Embedding.Config(num_embeddings=size, embedding_dim=width, param_init=given),
        lm_head=Linear.Config(in_features=width, out_features=size, param_init=given),
        layers=[layer() for _ in range(said["num_hidden_layers"])],
        enable_weight_tying=said["tie_word_embeddings"],
    )


def titan_model(checkpoint: Path) -> tuple[nn.Module, Qwen3StateDictAdapter]:
    """Return torchtitan's model with a checkpoint's weights, and what converts its state to the checkpoint's names."""
    config = titan_config(checkpoint)
    names = Qwen3StateDictAdapter(config, str(checkpoint))
    model = config.build()
    model.load_state_dict(names.from_hf(load_file(checkpoint / "model.safetensors")))
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), names


# adapter
def titan_logits(model: nn.Module, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the logits `[B, S, V]` of tokens padded on the right, which no token before the padding sees."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions=positions)


class TitanTrainer(TrainedModel):
    """The trainer's side of a run: a model of torchtitan, as its `PolicyTrainer` builds and steps it.

    Args:
        checkpoint: Folder of a Qwen3 checkpoint.
        learning_rate: Of AdamW, as torchtitan configures it.
        steps: Length of the schedule.
        tokenizer: The checkpoint's.
    """

    def __init__(self, checkpoint: Path, *, learning_rate: float, steps: int, tokenizer: Any) -> None:
        model, self._names = titan_model(checkpoint)
        reference, _ = titan_model(checkpoint)
        optimizers = default_adamw(lr=learning_rate).build(model_parts=[model])
        schedule = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
        schedulers = schedule.build(optimizers=optimizers, training_steps=steps)
        # The containers hold one optimizer and one schedule per optimizer's name, and there is one name.
        (optimizer,), (scheduler,) = optimizers.optimizers, schedulers.schedulers
        super().__init__(model, optimizer, scheduler, tokenizer=tokenizer, reference=reference, logits=titan_logits)

    def checkpoint_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as the engine loads them."""
        yield from self._names.to_hf(self.model.state_dict()).items()


# end of adapter


def train(run: Run, rows: list[Row], prompts: int, tokenizer: Any) -> None:
    """Train by torchtitan's GRPO loss with the mean of each prompt's samples as baseline.

    Args:
        run: A run that has been started.
        rows: Problems, in order.
        prompts: Problems per step.
        tokenizer: The model's.
    """
    rollout, trainer, policy_loss = run.rollout, run.trainer, GRPOLoss.Config().build()
    for first in tqdm(range(0, len(rows), prompts), unit="step"):
        problems = rows[first : first + prompts]
        batch = run.batch(rollout.generate([tokenizer(row["prompt"]).input_ids for row in problems]))
        with torch.no_grad():
            old, ref = run.score(batch), run.reference(batch)
        run.measure(batch, old=old, reference=ref)
        weights = run.correct(batch, old).as_multiplier()

        samples = len(batch) // len(problems)
        texts = tokenizer.batch_decode([record.response_ids for record in batch.records], skip_special_tokens=True)
        a, b = ([row[name] for row in problems for _ in range(samples)] for name in ("a", "b"))
        rewards = torch.tensor(reward(texts, a, b), device=old.device).view(-1, samples)
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)

        # torchtitan's ratio is to the generator's log-probabilities, clipped. Given the trainer's own, and advantages times
        # weights of at least 0, its loss is the one that the weights multiply.
        mask, labels = batch.response_mask, batch.of_responses(batch.tokens[:, 1:])
        logits, tokens = trainer.logits(batch), int(mask.sum())
        loss, of_loss = policy_loss(
            logits, labels, tokens, generator_logprobs=old, advantages=weights * advantages, loss_mask=mask
        )
        kl = run.kl(batch, logprobs=compute_logprobs(logits, labels), reference=ref)[mask].sum() / tokens
        run.step(loss + kl, max_norm=1.0)
        run.send()
        log = run.log(reward=rewards, entropy=of_loss["trainer/entropy/mean"])
        tqdm.write("  ".join(f"{name} {log.metrics[name]:.3g}" for name in SHOWN if name in log.metrics))
        if log.stop:
            break


def main() -> None:
    """Start the engine, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16, help="Prompts per step.")
    parser.add_argument("--mismatch", type=json.loads, default=BLOCK, help="Another block, as JSON.")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/torchtitan"))
    parser.add_argument("--model_name_or_path", type=Path, help="Folder of another dense Qwen3.")
    options = parser.parse_args()
    block = MismatchConfig.parse(options.mismatch)
    path = options.model_name_or_path or shipped_model("dense")
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = importlib.import_module(f"mismatch_ext.adapters.{options.engine}")
    limits = {"max_new_tokens": 112, "n": SAMPLES, "stop_token_ids": [tokenizer.eos_token_id]}
    rollout = engine.Rollout.launch(str(path), block, SamplingSettings(), **limits, **ARGUMENTS[options.engine])
    trainer = TitanTrainer(path, learning_rate=LEARNING_RATE, steps=options.steps, tokenizer=tokenizer)
    rows = make_dataset(options.prompts * options.steps, FAMILIAR_DIGITS, seed=1000)
    with Run(block, trainer, rollout, options.output_dir).start() as run:
        train(run, rows, options.prompts, tokenizer)
    rollout.shutdown()


if __name__ == "__main__":
    main()
