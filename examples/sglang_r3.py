"""Rollout routing replay (R3) in a training loop of one's own, with SGLang as the rollout engine.

    python examples/sglang_r3.py --steps 5
    python examples/sglang_r3.py --steps 5 --dtype float16

The loop of `r3_loop.py`, which has vLLM. SGLang records which experts each token went to, and the trainer replays them, so that
both compute the same function of the same weights; in float16 what remains is eight times smaller than in bfloat16. Each step
prints the gap to the engine on the step's own tokens, without replay and with it; the step trains with it. Every line that R3
needs is marked. Every weight update is verified by prefill: SGLang reports success also for weights that it dropped.
"""

from __future__ import annotations

import os

# Before SGLang is imported: the kernels' threads come from several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import sys
from pathlib import Path
from typing import Any

# Run as a file, Python would look for modules in examples/ only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from mismatch_ext.adapters import sglang as rollout
from mismatch_ext.adapters.transformers.routing import moe_layout, replay_routing
from mismatch_ext.adapters.transformers.scoring import score_tokens
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic.pretrain import ensure_model
from examples.arithmetic.task import FAMILIAR_DIGITS, make_dataset, reward
from mismatch_ext.config import MismatchConfig
from mismatch_ext.metrics import mismatch_metrics
from mismatch_ext.records import RolloutRecord, SamplingSettings
from mismatch_ext.routing import align

PROMPTS, SAMPLES, LEARNING_RATE = 16, 8, 5e-5
SAMPLING = SamplingSettings(temperature=1.0)
CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 16384,
    "grammar_backend": "none",
    "skip_server_warmup": True,
}


def batch(records: list[RolloutRecord]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens and attention mask, padded on the right, and the engine's log-probabilities, NaN where none were sampled."""
    tokens = [torch.tensor([*record.prompt_ids, *record.response_ids]) for record in records]
    logprobs = [torch.tensor([torch.nan] * len(r.prompt_ids) + list(r.rollout_logprobs)) for r in records]
    attention = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    return pad_sequence(tokens, batch_first=True), attention, pad_sequence(logprobs, True, padding_value=torch.nan)


def main() -> None:
    """Train by REINFORCE with the mean of each prompt's samples as baseline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="Prompts per step.")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="Of engine and trainer.")
    parser.add_argument(
        "--model-cache", type=Path, default=Path(".cache/models"), help="Where trained models are kept."
    )
    options = parser.parse_args()
    from sglang import Engine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = str(ensure_model("moe", options.model_cache))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler(device, enabled=options.dtype == "float16")  # gradients underflow in float16
    recording = {"enable_return_routed_experts": True}  # R3
    engine = Engine(
        model_path=path,
        dtype=options.dtype,
        skip_tokenizer_init=True,
        random_seed=0,
        log_level="error",
        **recording,
        **(CPU if device == "cpu" else {}),
    )
    transport = rollout.EngineTransport(engine)
    info = transport.server_info()
    rollout.check_server(info, config=MismatchConfig(), trainer_dtype=options.dtype).raise_for_problems()
    shape = moe_layout(model).shape  # R3: the MoE layers, experts per layer and experts per token

    def autocast() -> Any:
        return torch.autocast(device, getattr(torch, options.dtype))

    def score(tokens: Tensor, attention: Tensor) -> Tensor:
        """Return log-probabilities `[B, S-1]` of tokens 1 to S-1."""
        with autocast():
            logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, :-1]
        return logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    rows = make_dataset(options.prompts * options.steps, FAMILIAR_DIGITS, seed=1000)
    prompts = [tokenizer(row["prompt"]).input_ids for row in rows]
    probes = torch.randint(2, len(tokenizer), (16, 32), generator=torch.Generator().manual_seed(0)).to(device)
    weights = rollout.VerifiedWeights(
        transport,
        lambda: rollout.checkpoint_parameters(model),
        lambda ids: score_tokens(model, ids, autocast),
        probes=probes,
        dtype=options.dtype,
    )
    for step in tqdm(range(options.steps), unit="step"):
        now = slice(step * options.prompts, (step + 1) * options.prompts)
        request = rollout.generate_request(
            prompts[now],
            SAMPLING,
            max_new_tokens=112,
            n=SAMPLES,
            stop_token_ids=[tokenizer.eos_token_id],
            routing=True,  # R3
        )
        outputs = transport.generate(request)
        reading = rollout.read_server(info)
        records = rollout.to_records(
            outputs,
            prompt_ids=prompts[now],
            provenance=rollout.to_provenance(reading, sampling=SAMPLING, weight_version=weights.version),
            n=SAMPLES,
            weight_version=str(weights.version) if weights.version else None,
            shape=shape,  # R3: a checked trace per response
        )
        tokens, attention, sampled = (part.to(device) for part in batch(records))
        sampled, mask = sampled[:, 1:], ~sampled[:, 1:].isnan()
        trace, recorded = align([r.routing for r in records], attention)  # R3: laid along the padded batch

        with torch.no_grad():  # for comparison only
            native = mismatch_metrics(score(tokens, attention), sampled, mask)
        with replay_routing(model, trace, recorded):  # R3; a checkpointed backward pass may come after the block
            logprobs = score(tokens, attention)
        replayed = mismatch_metrics(logprobs.detach(), sampled, mask)

        texts = [tokenizer.decode(record.response_ids, skip_special_tokens=True) for record in records]
        rewards = torch.tensor(
            [
                reward(texts[i * SAMPLES : (i + 1) * SAMPLES], [row["a"]] * SAMPLES, [row["b"]] * SAMPLES)
                for i, row in enumerate(rows[now])
            ]
        )
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1).to(device)
        loss = -(advantages * logprobs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        verdict = weights.update()  # also forgets cached prefixes and their routes; raises if the engine holds others
        tqdm.write(
            f"step {step + 1}: reward {rewards.mean():.2f}, k3 {native['k3_kl']:.1e} -> {replayed['k3_kl']:.1e} with replay, "
            f"max|Δlogp| {native['logp_abs_diff_max']:.2f} -> {replayed['logp_abs_diff_max']:.2f}, weights {verdict.status}"
        )
    engine.shutdown()


if __name__ == "__main__":
    main()
