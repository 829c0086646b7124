"""Runs of the real TRL and vLLM with completions of several turns: tools, environments, functions of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from mismatch_ext.adapters.trl.overridden import shadowed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams

from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import EOS_TOKEN, PAD_TOKEN, VOCABULARY
from tests.models import tiny_model
from tests.oracle import watch_float32_error
from tests.peers.trl.scenarios_training import arguments, digest_of

EXTRA = "abcdefghijklmnopqrstuvwxyz_<>|"
TEMPLATE = (
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}<{{ m.content }}>"
    "{%- elif m.role == 'assistant' -%}{{ m.content }}{%- for c in m.tool_calls or [] -%}|{{ c.function.name }}"
    "{%- for k, v in c.function.arguments.items() -%}_{{ k }}{{ v }}{%- endfor -%}{%- endfor -%}{{ eos_token }}"
    "{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}={%- endif -%}"
)
CALLS = [
    {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}},
    {"type": "function", "function": {"name": "peek", "arguments": {}}},
]
# A random model asks for nothing: whatever it says is taken for calls, until TRL's limit of two ends it.
ANSWER = {
    "start_anchor": "=",
    "defaults": {"role": "assistant", "tool_calls": CALLS},
    "fields": {"content": {"content": "text"}},
}

BLOCK: dict[str, Any] = {
    "precision": {"dtype": "float32"},
    "routing": {"mode": "R3", "measured": 1.0, "reference": True},
    "sampling_mask": {},
    "correction": {"preset": "decoupled_token_is"},
    "kl": {"coef": 0.05},
    "lr": {"period": 2},
    "monitor": {"default_alarms": False},
}


def speaking_model(directory: Path) -> Path:
    """Save a tiny mixture of experts with a tokenizer that has letters and a chat template with tools."""
    tiny_model("moe", directory, extra_vocabulary=len(EXTRA))
    backend = Tokenizer(
        models.WordLevel(VOCABULARY | {letter: len(VOCABULARY) + at for at, letter in enumerate(EXTRA)})
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN, padding_side="left",
        model_input_names=["input_ids", "attention_mask"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, ANSWER
    tokenizer.save_pretrained(directory)
    return directory


def asked(steps: int = 8) -> Dataset:
    """Return prompts of a conversation."""
    rows = make_dataset(2 * steps, seed=5)
    return Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


class Counter:
    """An environment that counts how often it was looked at."""

    def reset(self, **_: Any) -> None:
        """Begin anew."""
        self.looks = 0

    def peek(self) -> str:
        """Look at it."""
        self.looks += 1
        return str(self.looks)


def even(completions: list[Any], **_: Any) -> list[float]:
    """Reward that varies between the completions of a random model."""
    texts = ["".join(m["content"] for m in messages if m["role"] == "assistant") for messages in completions]
    return [sum(c in "02468ace" for c in text) / max(len(text), 1) for text in texts]


def build(out: str, block: Any, *, kind: Any = MismatchGRPOTrainer, extra: Any = None, **overrides: Any) -> Any:
    """Build a trainer whose completions take three turns of five tokens at most."""
    given = {
        "bf16": False, "router_aux_loss_coef": 0.0, "model_init_kwargs": {"experts_implementation": "eager"},
        "max_tool_calling_iterations": 2, "generation_kwargs": {"max_tokens": 5}, "max_completion_length": 26,
        "vllm_max_model_length": 96, "top_k": 8, "temperature": 0.8, **overrides,
    }  # fmt: skip
    return kind(
        model=str(speaking_model(Path(out) / "model")),
        reward_funcs=even,
        args=MismatchGRPOConfig(**arguments(f"{out}/run", mismatch=block, **given)),
        train_dataset=asked(),
        **({"tools": [add], "environment_factory": Counter} if extra is None else extra),
    )


class Batches:
    """Keeps what each batch had, as TRL has scored it."""

    def __init__(self, trainer: Any) -> None:
        self.found: list[dict[str, Any]] = []
        plain = trainer._generate_and_score_completions

        def kept(inputs: Any) -> Any:
            output = plain(inputs)
            mask, tools = output["completion_mask"].bool(), output["tool_mask"].bool()
            # The first batch's completions are cut by TRL within their third turn, the others' end with it.
            trainer.max_completion_length = 40
            self.found.append(
                {
                    "turns": [_runs(row) for row in (mask & tools).tolist()],
                    "tool_tokens": int((mask & ~tools).sum()),
                    "engine": float(output["sampling_per_token_logps"][mask & ~tools].abs().max()),
                    "gap": float(
                        (output["old_per_token_logps"] - output["sampling_per_token_logps"])[mask & tools].abs().max()
                    ),
                    "lengths": mask.sum(1).tolist(),
                }
            )
            return output

        trainer._generate_and_score_completions = kept


def _runs(row: list[bool]) -> int:
    """Return how many stretches of True there are."""
    return sum(here and not before for before, here in zip([False, *row], row, strict=False))


def attempt(trainer: Any, **methods: Callable[..., Any]) -> dict[str, Any]:
    """Take a training step under planted methods, from generation to gradients."""
    before = digest_of(trainer.model)
    trainer.model.train()
    trainer._buffered_inputs, trainer._step = None, 0
    trainer.current_gradient_accumulation_steps = 1
    trainer.mm.log._faults.clear()
    batch = next(iter(trainer.get_train_dataloader()))
    found: dict[str, Any] = {"error": "", "message": ""}
    try:
        with shadowed(trainer, **methods):
            trainer.training_step(trainer.model, batch, None)
    except Exception as error:  # noqa: BLE001 - what is raised is the result
        found = {"error": type(error).__name__, "message": str(error)}
    found["bad"] = [fault.message for fault in trainer.mm.log._faults.get("train", [])]
    found["gradients"] = any(p.grad is not None and bool(p.grad.any()) for p in trainer.model.parameters())
    trainer.model.zero_grad()
    return {**found, "moved": digest_of(trainer.model) != before}


def _again(trainer: Any, change: Callable[[list[list[int]], list[list[int]]], None]) -> Callable[..., Any]:
    """Return a generation that changes what the second turn is given; `change` takes its prompts and those of the first."""
    plain, calls = trainer._generate_single_turn, []

    def generate(prompt_ids: list[list[int]], *rest: Any, **named: Any) -> Any:
        calls.append([list(ids) for ids in prompt_ids])
        if len(calls) == 2:
            change(prompt_ids, calls[0])
        return plain(prompt_ids, *rest, **named)

    return generate


def _afterwards(trainer: Any, change: Callable[[list[int], list[list[Any]]], None]) -> Callable[..., Any]:
    """Return a tool loop whose third completion is changed; `change` takes its turns' starts, and its columns."""
    plain = trainer._tool_call_loop

    def loop(*given: Any, **named: Any) -> Any:
        masks, completions, ids, logprobs, *rest = plain(*given, **named)
        row = masks[2]
        starts = [place for place, one in enumerate(row) if one and (place == 0 or not row[place - 1])]
        change(starts, [ids[2], masks[2], logprobs[2]])
        return masks, completions, ids, logprobs, *rest

    return loop


def _cut(columns: list[list[Any]], first: int, last: int | None) -> None:
    for column in columns:
        del column[first:last]


def _other_id(ids: list[int], place: int) -> None:
    ids[place] = ids[place] % 14 + 2


def _rendered_again(prompts: list[list[int]], first: list[list[int]]) -> None:
    prompts[2] = list(prompts[2])
    _other_id(prompts[2], len(first[2]) + 1)


def measured(out: str) -> dict[str, Any]:
    """Train with tools and a config that does not act; then let a chat template render a turn again, in one more step."""
    trainer = build(out, {}, max_steps=2, top_k=0)
    batches = Batches(trainer)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "history": [{k: v for k, v in entry.items() if "mismatch/" in k} for entry in logs],
        "batches": list(batches.found),
        "failed": dict(trainer.mm.checks.counts),
    }
    step = attempt(trainer, _generate_single_turn=_again(trainer, _rendered_again))
    noted = {name: values[-1] for name, values in trainer._metrics["train"].items() if "mismatch/turns/" in name}
    return found | {"step": step, "noted in it": noted, "failed in it": dict(trainer.mm.checks.counts)}


def faults(trainer: Any) -> dict[str, Any]:
    """Plant what goes wrong between turns, one after the other, and take a step each."""
    found: dict[str, Any] = {}

    def updated(prompts: Any, first: Any) -> None:
        with torch.no_grad():
            next(trainer.model.parameters()).mul_(1.001)
        trainer.vllm_generation.sync_weights()

    def moved(starts: list[int], columns: list[list[Any]]) -> None:
        values = columns[2]
        values[:2] = values[1::-1]

    loops: dict[str, Any] = {
        "changed": lambda starts, columns: _other_id(columns[0], starts[1]),
        "dropped": lambda starts, columns: _cut(columns, starts[1], starts[2]),
        "last dropped": lambda starts, columns: _cut(columns, starts[2], None),
        "tool's token": lambda starts, columns: columns[1].__setitem__(starts[1] - 1, 1),
        "log-probabilities": moved,
    }
    found["rendered again"] = attempt(trainer, _generate_single_turn=_again(trainer, _rendered_again))
    for name, change in loops.items():
        found[name] = attempt(trainer, _tool_call_loop=_afterwards(trainer, change))
    found["none"] = attempt(trainer)
    # Last: it changes the weights.
    found["two versions"] = attempt(trainer, _generate_single_turn=_again(trainer, updated))
    return found


def asking(trainer: Any, call: Callable[[list[list[int]]], tuple[Any, Any]], *, drop: str = "") -> Callable[..., Any]:
    """Return a `rollout_func` of two turns with a word of the environment between them.

    Args:
        trainer: The trainer.
        call: Takes prompts, and returns tokens and log-probabilities.
        drop: What goes wrong: "mask" gives none, "render" tokenizes the first turn anew, "alien" samples nothing.
    """
    word = trainer.processing_class("<7>=")["input_ids"]

    def rollout(prompts: list[Any], _: Any) -> dict[str, Any]:
        texts = ["".join(message["content"] for message in prompt) for prompt in prompts]
        given = [trainer.processing_class(text)["input_ids"] for text in texts]
        if drop == "alien":
            return {
                "prompt_ids": given,
                "completion_ids": [[3, 4]] * len(given),
                "logprobs": [[-1.0, -2.0]] * len(given),
            }
        call([word[:2]])  # about something else
        first, one = call(given)
        call([given[0] + list(first[0]) + word])  # another candidate for a second turn
        begun = [p + list(ids) + word for p, ids in zip(given, first, strict=True)]
        again = _again_id(begun[0], len(given[0])) if drop == "render" else begun[0]
        second, two = call([again, *begun[1:]])
        blank = [0.0] * len(word)
        found = {
            "prompt_ids": given,
            "completion_ids": [[*a, *word, *b] for a, b in zip(first, second, strict=True)],
            "logprobs": [[*a, *blank, *b] for a, b in zip(one, two, strict=True)],
            "env_mask": [[1] * len(a) + [0] * len(word) + [1] * len(b) for a, b in zip(first, second, strict=True)],
        }
        return {name: value for name, value in found.items() if (drop, name) != ("mask", "env_mask")}

    return rollout


def _again_id(ids: list[int], place: int) -> list[int]:
    changed = list(ids)
    _other_id(changed, place)
    return changed


def functions(out: str) -> dict[str, Any]:
    """Train twice by a `rollout_func` that asks TRL's wrapper; then plant faults."""
    block = {
        "precision": {"dtype": "float32"},
        "routing": {**BLOCK["routing"], "reference": False},
        "monitor": {"default_alarms": False},
    }
    settings = {"top_k": 0, "temperature": 0.8, "generation_kwargs": {"max_tokens": 5}}
    trainer = build(out, block, extra={"rollout_func": lambda *_: {}}, max_steps=1, **settings)

    def wrapper(prompts: list[list[int]]) -> tuple[Any, Any]:
        _, ids, logprobs, _ = trainer.vllm_generation.generate(prompts=prompts, images=None, num_generations=1)
        return ids, [[top[0] for top in row] for row in logprobs]

    def direct(prompts: list[list[int]]) -> tuple[Any, Any]:
        asked = SamplingParams(temperature=0.8, max_tokens=5, logprobs=0)
        outputs = trainer.vllm_generation.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False
        )
        found = [output.outputs[0] for output in outputs]
        chosen = [
            [top[token].logprob for token, top in zip(one.token_ids, one.logprobs or [], strict=False)] for one in found
        ]
        return [list(one.token_ids) for one in found], chosen

    errors, batches = watch_float32_error(trainer), Batches(trainer)
    trainer.rollout_func = asking(trainer, wrapper)
    trainer.train()
    trainer.args.max_steps = 2
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    kept = {"errors": list(errors), "batches": list(batches.found)}
    planted = {
        "rendered again": asking(trainer, wrapper, drop="render"),
        "no mask": asking(trainer, wrapper, drop="mask"),
        "vLLM itself": asking(trainer, direct),
        "another engine": asking(trainer, wrapper, drop="alien"),
    }
    found = {}
    for name, rollout in planted.items():
        trainer.rollout_func = rollout
        found[name] = attempt(trainer)
    return {
        "history": [{k: v for k, v in entry.items() if "mismatch/" in k} for entry in logs], **kept, "faults": found,
    }  # fmt: skip


def tools(out: str) -> dict[str, Any]:
    """Train with every section that there is, then plant faults in the same trainer and engine."""
    trainer = build(out, BLOCK, max_steps=2)
    errors = watch_float32_error(trainer)
    batches = Batches(trainer)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "history": [{k: v for k, v in entry.items() if "mismatch/" in k or k == "kl"} for entry in logs],
        "float32_errors": list(errors),
        "batches": batches.found[:2],
        "faults": faults(trainer),
    }
