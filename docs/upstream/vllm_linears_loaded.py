"""vLLM's CPU engine cannot load a weight as trainers send it: its packed linear layers have lost their weight loader."""

import os
import tempfile

from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM

PEER = "vllm"
REPORTED = "not reported"
WORKAROUND = "`update_weights` (adapters/vllm/weights.py) goes by the layer-wise reload, which packs anew"
ALONE = True
EXPECTED = "loaded"
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 32}
TRAINER = Qwen3ForCausalLM(Qwen3Config(num_attention_heads=2, num_key_value_heads=2, **SIZES))
TRAINER.save_pretrained(FOLDER := tempfile.mkdtemp())
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
ENGINE = LLM(FOLDER, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.05, skip_tokenizer_init=True)


def seen(load=lambda llm, weights: llm.apply_model(lambda model: model.load_weights(weights))) -> str:
    """Load all weights, as TRL's colocated engine is given them."""
    try:
        load(ENGINE, TRAINER.named_parameters())
    except AttributeError as error:
        return f"AttributeError: {error}"
    return "loaded"


def with_workaround() -> str:
    from mismatch_ext.adapters.vllm import update_weights

    return seen(update_weights)


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
