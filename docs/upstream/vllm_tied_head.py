"""vLLM's CPU engine keeps the output head of before a weight update, if the head is tied to the embeddings."""

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

PEER = "vllm"
REPORTED = "not reported"
WORKAROUND = "`update_weights` (adapters/vllm/weights.py) packs the head again after vLLM's reload"
ALONE = True
EXPECTED = 0
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 2}
torch.manual_seed(0)
TRAINER = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SIZES)).requires_grad_(False)
TRAINER.save_pretrained(FOLDER := tempfile.mkdtemp())
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
ENGINE = LLM(FOLDER, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.05, skip_tokenizer_init=True)
RELOAD = ENGINE.llm_engine.model_executor.driver_worker.model_runner.reload_weights


def seen(load=lambda llm, weights: RELOAD(weights_iterator=weights)) -> float:
    """Update the engine by its own reload, and return how far it then is from the trainer's model, in nats per token."""
    TRAINER.get_input_embeddings().weight += torch.randn(64, 64) / 10
    load(ENGINE, TRAINER.named_parameters())
    trainers = TRAINER(torch.arange(32)[None]).logits.log_softmax(-1)[0, range(31), range(1, 32)]
    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = ENGINE.generate([{"prompt_token_ids": list(range(32))}], settings, use_tqdm=False)
    engines = [entry[token].logprob for token, entry in enumerate(answer.prompt_logprobs) if entry]
    return round(float((torch.tensor(engines) - trainers).abs().mean()), 3)


def with_workaround() -> float:
    from mismatch_ext.adapters.vllm import update_weights

    return seen(update_weights)


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
