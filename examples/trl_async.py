"""AsyncGRPO with TRL, a vLLM server and the `mismatch:` block, on addition problems.

Run the server on one GPU, with mismatch-ext installed beside vLLM (`examples/trl_server.sh serve` with your model and `--dtype
float16`), and the trainer, which takes TRL's arguments, on other GPUs:

    CUDA_VISIBLE_DEVICES=1 python examples/trl_async.py --model_name_or_path Qwen/Qwen3-0.6B --max_steps 20 \
        --vllm_server_base_url http://127.0.0.1:8000 --mismatch '{"precision": {"dtype": "float16"}}'
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import examples.script as shared  # first, because it sets what vLLM reads when it is imported

# isort: split
import torch
from datasets import Dataset
from mismatch_ext.adapters.trl.async_grpo import MismatchAsyncGRPOConfig, MismatchAsyncGRPOTrainer
from transformers import AutoTokenizer
from trl import TrlParser

from examples.arithmetic.task import make_dataset, score

SMALL = {
    "output_dir": "runs/async", "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 48,
    "max_steps": 4, "learning_rate": 1e-4, "report_to": "none", "save_strategy": "no", "gradient_checkpointing": False,
    "mismatch": '{"precision": {"dtype": "float32"}}',
}  # fmt: skip
"""Arguments for a small model; the command line overrides them."""


def reward(completions: list[Any], a: list[int], b: list[int], **_: object) -> list[float]:
    """Score a batch of conversations; a function of a module, because it runs in another process."""
    return [score(str(turns[0].get("content", "")), x, y) for turns, x, y in zip(completions, a, b, strict=True)]


def problems(count: int, seed: int) -> Dataset:
    """Return problems as conversations, which AsyncGRPO asks for."""
    rows = make_dataset(count, seed=seed)
    return Dataset.from_list([{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])


def tokenizer_of(path: str) -> Any:
    """Return a model's tokenizer; if it has no chat template, as with the small models, it gets one that adds nothing."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        content = {"type": "string", "x-regex": r"^(.*)$"}
        tokenizer.response_schema = {
            "type": "object",
            "properties": {"role": {"const": "assistant"}, "content": content},
        }
    return tokenizer


def main() -> None:
    """Train."""
    kinds: Any = (shared.ScriptArguments, MismatchAsyncGRPOConfig)
    parser = TrlParser(kinds)
    parser.set_defaults_with_config(**SMALL, use_cpu=not torch.cuda.is_available())
    script, config = parser.parse_args_and_config()
    path = shared.model_path(script)
    trainer = MismatchAsyncGRPOTrainer(
        model=path,
        reward_funcs=reward,
        args=config,
        train_dataset=problems(64, seed=1000 + config.seed),
        processing_class=tokenizer_of(path),
    )
    trainer.train()


if __name__ == "__main__":
    main()
