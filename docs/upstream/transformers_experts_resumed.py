"""Trainer resumes a mixture of experts with the experts that training began with: checkpoints have other names for them."""

import tempfile

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

PEER = "transformers"
REPORTED = "https://github.com/huggingface/transformers/issues/48805"
WORKAROUND = "none of ours: load the checkpoint by `from_pretrained` too, which converts the names"
SIZES = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
EXPECTED = 0.0


def seen(load=lambda model, folder: None) -> float:
    """Return how far the experts are from those of the checkpoint that was loaded."""
    torch.manual_seed(0)
    saved, begun = (Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS)) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        trainer = Trainer(begun, TrainingArguments(folder, use_cpu=True, report_to=[]))
        trainer._load_from_checkpoint(folder)
        load(begun, folder)
    experts = [model.model.layers[0].mlp.experts.gate_up_proj for model in (saved, begun)]
    return float(torch.dist(*experts))


def with_workaround() -> float:
    """Load the weights once more by `from_pretrained`."""
    return seen(lambda model, folder: model.load_state_dict(type(model).from_pretrained(folder).state_dict()))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
