"""A step of TRL's GRPO with a `vllm serve` and every update and rollout checked, against stock TRL's, step by step in turn.

TRL's own client reaches no server on a CPU: the stock one sends weights in the same requests as ours, and asks nothing. What the
block does here changes no number, so that both sample the same tokens and learn the same, which is checked. Two ratios are
printed: of the clock, and of the processor time of trainer and server together, which other programs do not lengthen.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.harness import be_quiet
from benchmarks.stability.miniature import END
from benchmarks.turns import Step, TakesTurns, take_turns, tokens_per_step
from tests.peers.engines.vllm_server import processes, serving

BLOCK: dict[str, Any] = {"precision": {"dtype": "float32"}, "monitor": {}}
"""Changes no number of stock TRL's: the audit, names and verification of updates, records, and the gap."""
FLAGS = ("--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--max-model-len", "512")
TRANSFER = ("--weight-transfer-config", '{"backend": "mismatch_http"}')
TICKS = os.sysconf("SC_CLK_TCK")


VOCABULARY, HIDDEN, LAYERS = 4096, 256, 4
PROMPTS, PROMPT, NEW, MICRO = 8, 32, 96, 16  # a step has 8 completions of each prompt


def save(folder: Path) -> int:
    """Write a model with random weights and its tokenizer; return its number of parameters."""
    from benchmarks.stability.real import tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // 32, num_key_value_heads=HIDDEN // 64,
        head_dim=32, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.05, bos_token_id=None,
        eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer(VOCABULARY).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the share of even tokens."""
    return [sum(word[-1] in "02468" for word in text.split()) / max(len(text.split()), 1) for text in completions]


def transport(base: type) -> type:
    """Return TRL's client, but with weights in the bodies of requests, because its own way needs a GPU on both sides."""
    from mismatch_ext.adapters.vllm.http import ServerHttp
    from mismatch_ext.adapters.vllm.remote import RemoteEngine

    class Transport(base):  # type: ignore[misc, valid-type]
        def init_communicator(self, device: Any = 0) -> None:
            self.remote = RemoteEngine(ServerHttp(self.base_url, self.session, 60.0))
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})

        def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
            self._start_weight_update()
            self.remote.send(named_params)
            self._finish_weight_update()

    return Transport


def train(kind: str, model: str, out: str, url: str, steps: int, pipe: Connection) -> None:
    """Train in its own process, one step each time it is told to."""
    Path(out).mkdir()
    be_quiet(Path(out))
    import trl.generation.vllm_generation as module
    from datasets import Dataset
    from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
    from trl import GRPOConfig, GRPOTrainer

    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(1, VOCABULARY, (steps * PROMPTS, PROMPT), generator=generator)
    rows = [{"prompt": " ".join(f"t{token}" for token in row)} for row in drawn.tolist()]
    given: dict[str, Any] = {
        "output_dir": out, "max_steps": steps, "num_generations": 8, "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": 8 * PROMPTS // MICRO, "max_completion_length": NEW, "bf16": False,
        "use_cpu": True, "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "gradient_checkpointing": False, "seed": 0, "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"}, "generation_kwargs": {"seed": 1},
    }  # fmt: skip
    rest: dict[str, Any] = {
        "model": model,
        "reward_funcs": reward,
        "train_dataset": Dataset.from_list(rows),
        "callbacks": [TakesTurns(pipe)],
    }
    if kind == "ours":
        trainer = MismatchGRPOTrainer(args=MismatchGRPOConfig(**given, mismatch=BLOCK), **rest)
    else:
        module.VLLMClient = transport(module.VLLMClient)  # type: ignore[misc]
        trainer = GRPOTrainer(args=GRPOConfig(**given), **rest)
    trainer.train()
    pipe.close()
    os._exit(0)  # threads of libraries may outlive the main one


def processor_of(url: str) -> float:
    """Return the seconds that a server's processes have had of the processor."""
    spent = 0
    for process in processes(url):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        spent += int(fields[11]) + int(fields[12])
    return spent / TICKS


def measure(steps: int) -> tuple[int, list[tuple[Step, Step]]]:
    """Return the model's number of parameters, and what the steps of ours and of stock took, pair by pair."""
    urls: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as standing:
        folder = Path(name)
        size = save(folder / "model")
        for kind in ("theirs", "ours"):
            (folder / f"server-{kind}").mkdir()
            urls[kind] = standing.enter_context(
                serving(folder / "model", folder / f"server-{kind}", *FLAGS, *TRANSFER, development=True)
            )
        given = {kind: (kind, str(folder / "model"), str(folder / kind), urls[kind], steps) for kind in urls}
        return size, take_turns(steps, train, given, beside=lambda kind: processor_of(urls[kind]))


def run(steps: int = 8) -> list[dict[str, Any]]:
    """Return the rows of this benchmark, by the clock and by the processor; a ratio is the stock step's time over ours."""
    size, pairs = measure(steps)
    same = [same_learned(ours["learned"], theirs["learned"]) for ours, theirs in pairs]
    # Servers batch requests as they come in, so sums may round differently, and in rare cases another token is sampled.
    assert sum(same) >= len(same) - 1, [(ours["learned"], theirs["learned"]) for ours, theirs in pairs]
    equal = f"tokens, reward, loss and gradient norm in {sum(same)} of {len(same)} steps"
    what = f"a step of TRL with a vLLM server, {size / 1e6:.2g} million parameters, {tokens_per_step(pairs):.0f} tokens"
    found: list[dict[str, Any]] = []
    for unit in ("clock", "processor"):
        name = f"{what}: every update and rollout checked vs stock, {unit} time"
        mine, stock = ([side[unit] for side in sides] for sides in zip(*pairs, strict=True))
        ratio = median(theirs / ours for ours, theirs in zip(mine, stock, strict=True))
        found.append({"name": name, "ours": median(mine), "theirs": median(stock), "ratio": ratio, "equal": equal})
    return found


def same_learned(ours: dict[str, float], theirs: dict[str, float]) -> bool:
    """Whether two steps had the same tokens and learned the same, except for rounding."""
    if ours["num_tokens"] != theirs["num_tokens"] or ours["reward"] != theirs["reward"]:
        return False
    return all(abs(ours[name] - theirs[name]) <= 1e-5 + 1e-3 * abs(theirs[name]) for name in ("loss", "grad_norm"))
