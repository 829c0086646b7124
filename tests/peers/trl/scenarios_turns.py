"""Runs of the real TRL and vLLM with completions of several turns: tools, environments, functions of one's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from mismatch_ext.adapters.trl.overridden import shadowed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.arithmetic.task import make_dataset
from examples.arithmetic.tokenizer import EOS_TOKEN, PAD_TOKEN, VOCABULARY
from mismatch_ext.errors import RecordError
from tests.models import tiny_model
from tests.oracle import expect_float32, watch_float32_error
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


def attempt(trainer: Any, **methods: Callable[..., Any]) -> list[str]:
    """Compute a step's gradients under planted methods, from generation on, and return what was said of bad rows."""
    trainer.model.train()
    trainer._buffered_inputs, trainer._step = None, 0
    trainer.current_gradient_accumulation_steps = 1
    trainer.mm.log._faults.clear()
    batch = next(iter(trainer.get_train_dataloader()))
    with shadowed(trainer, **methods):
        trainer.training_step(trainer.model, batch, None)
    assert has_gradients(trainer)
    trainer.model.zero_grad()
    return [fault.message for fault in trainer.mm.log._faults.get("train", [])]


def has_gradients(trainer: Any) -> bool:
    """Tell whether a gradient has reached a parameter."""
    return any(p.grad is not None and bool(p.grad.any()) for p in trainer.model.parameters())


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


def _other_id(ids: list[int], place: int) -> None:
    ids[place] = ids[place] % 14 + 2


def _rendered_again(prompts: list[list[int]], first: list[list[int]]) -> None:
    prompts[2] = list(prompts[2])
    _other_id(prompts[2], len(first[2]) + 1)


def measured(out: str) -> None:
    """Train with tools and a config that does not act; then let a chat template render a turn again, in one more step."""
    trainer = build(out, {}, max_steps=2, top_k=0)
    batches = Batches(trainer)
    trainer.train()
    for entry, batch in zip(steps_of(trainer), batches.found, strict=True):
        assert entry["mismatch/turns"] == 3 and entry["mismatch/k3_kl"] > 0
        assert entry["mismatch/turns/forked_frac"] == entry["mismatch/turns/misplaced_frac"] == 0
        assert entry["mismatch/tokens"] == sum(batch["lengths"]) - batch["tool_tokens"]
    (said,) = attempt(trainer, _generate_single_turn=_again(trainer, _rendered_again))
    expect_words(said, NAMED["rendered again"])
    assert not trainer.mm.checks.counts
    # One of eight completions was given another history in its second turn.
    noted = {name: values[-1] for name, values in trainer._metrics["train"].items() if "mismatch/turns/" in name}
    assert noted["mismatch/turns/forked_frac"] == 1 / 8 and noted["mismatch/turns/misplaced_frac"] > 0
    causes = {name: value for name, value in noted.items() if "/forked/" in name}
    # Of a sampled turn so short that its first token is the changed one no call is found, and so no cause.
    assert list(causes.values()) == [1 / 8] and "/".join(causes).endswith(("/turn_edited", "/unknown")), causes


# What each fault is called; the third completion has it.
NAMED = {
    "rendered again": [r"completion 2: token \d+ of the completion", "The nearest call", "chat template"],
    "changed": [
        r"completion 2: token \d+ of the completion \(id \d+\) counts",
        r"sampled id \d+ as token \d+ of the completion, where id",
    ],
    "last dropped": [r"completion 2: a turn was dropped: the engine sampled \d tokens"],
    "log-probabilities": ["completion 2: token 0 of the completion is trained with log-probability"],
}


def expect_words(message: str, words: list[str]) -> None:
    """Check what a message says."""
    assert all(re.search(one, message) for one in words), message


def steps_of(trainer: Any) -> list[dict[str, Any]]:
    """Return what was logged of each step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def faults(trainer: Any) -> None:
    """Plant what goes wrong between turns, one after the other: one row is bad, and the others are trained on."""
    before = digest_of(trainer.model)

    def drop_last(starts: list[int], columns: list[list[Any]]) -> None:
        for column in columns:
            del column[starts[2] :]

    def exchange(starts: list[int], columns: list[list[Any]]) -> None:
        values = columns[2]
        values[:2] = values[1::-1]

    loops: dict[str, Any] = {
        "changed": lambda starts, columns: _other_id(columns[0], starts[1]),
        "last dropped": drop_last,
        "log-probabilities": exchange,
    }
    planted = {name: {"_tool_call_loop": _afterwards(trainer, change)} for name, change in loops.items()}
    planted["rendered again"] = {"_generate_single_turn": _again(trainer, _rendered_again)}
    for name, methods in planted.items():
        (said,) = attempt(trainer, **methods)
        expect_words(said, NAMED[name])
    assert attempt(trainer) == [] and digest_of(trainer.model) == before

    def updated(prompts: Any, first: Any) -> None:
        with torch.no_grad():
            next(trainer.model.parameters()).mul_(1.001)
        trainer.vllm_generation.sync_weights()

    # Last: it changes the weights. All completions have it, and none is trained on.
    words = "completion 0, turn 0 has weight_version=3, completion 0, turn 1 has weight_version=4"
    with pytest.raises(RecordError, match=words):
        attempt(trainer, _generate_single_turn=_again(trainer, updated))
    assert not has_gradients(trainer)


def asking(trainer: Any, call: Callable[[list[list[int]]], tuple[Any, Any]], *, drop: str = "") -> Callable[..., Any]:
    """Return a `rollout_func` of two turns with a word of the environment between them.

    Args:
        trainer: The trainer.
        call: Takes prompts, and returns tokens and log-probabilities.
        drop: What goes wrong: "render" tokenizes the first turn anew, "alien" samples nothing.
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
        return {
            "prompt_ids": given,
            "completion_ids": [[*a, *word, *b] for a, b in zip(first, second, strict=True)],
            "logprobs": [[*a, *blank, *b] for a, b in zip(one, two, strict=True)],
            "env_mask": [[1] * len(a) + [0] * len(word) + [1] * len(b) for a, b in zip(first, second, strict=True)],
        }

    return rollout


def _again_id(ids: list[int], place: int) -> list[int]:
    changed = list(ids)
    _other_id(changed, place)
    return changed


def _again_id(ids: list[int], place: int) -> list[int]:
    changed = list(ids)
    _other_id(changed, place)
    return changed


def functions(out: str) -> None:
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

    errors, batches = watch_float32_error(trainer), Batches(trainer)
    trainer.rollout_func = asking(trainer, wrapper)
    trainer.train()
    # The second training's first weights TRL by itself does not send.
    trainer.args.max_steps = 2
    trainer.train()
    expect_float32(steps_of(trainer), errors)
    for batch in batches.found:
        assert batch["gap"] < 1e-4 and batch["turns"] == [2] * 8 and batch["tool_tokens"] == 8 * 4
    for entry, batch in zip(steps_of(trainer), batches.found[1:], strict=True):  # the second training's log begins anew
        # Two calls of each batch lead to no completion.
        assert entry["mismatch/turns"] == 2 and entry["mismatch/tokens"] == sum(batch["lengths"]) - 8 * 4
        assert entry["mismatch/routing/set_mismatch_frac"] == entry["mismatch/routing/rerouted_rows"] == 0.0
        assert entry["mismatch/routing/sampled_rows"] == entry["mismatch/tokens"] - 8 * 2

    trainer.rollout_func = asking(trainer, wrapper, drop="render")
    (said,) = attempt(trainer)
    expect_words(said, [r"completion 0: token \d+ of the completion .* was given id \d+ as token 0 of the completion"])
    trainer.rollout_func = asking(trainer, wrapper, drop="alien")
    with pytest.raises(RecordError, match="vllm_generation.generate has not sampled.*an engine of your own"):
        attempt(trainer)
    assert not has_gradients(trainer)


def tools(out: str) -> None:
    """Train with every section that there is, then plant faults in the same trainer and engine."""
    trainer = build(out, BLOCK, max_steps=2)
    errors = watch_float32_error(trainer)
    batches = Batches(trainer)
    trainer.train()
    history = steps_of(trainer)
    expect_float32(history, errors)
    for entry, batch in zip(history, batches.found, strict=True):
        assert batch["turns"] == [3] * 8 and batch["gap"] < 1e-4
        # A tool's tokens have no log-probability, and count for nothing.
        assert batch["tool_tokens"] == 8 * 2 * 7 and batch["engine"] == 0.0
        assert entry["mismatch/tokens"] == sum(batch["lengths"]) - batch["tool_tokens"]
        assert entry["mismatch/logp_abs_diff_mean"] < 1e-5 and entry["mismatch/turns"] == 3
        for name in ("set_mismatch_frac", "rerouted_rows", "other_passes"):
            assert entry[f"mismatch/routing/{name}"] == 0.0, name
        assert entry["mismatch/sampling_mask_size"] == 8.0
        assert entry["mismatch/routing/prefilled_rows"] > 8 * 2 * (7 + 1)
    cut, whole = batches.found
    assert max(cut["lengths"]) == 26 < max(whole["lengths"])
    # A turn's last token is given to the next turn's prefill, and the completion's to none, unless TRL has cut it there.
    sampled = [entry["mismatch/tokens"] - entry["mismatch/routing/sampled_rows"] for entry in history]
    assert 8 * 2 <= sampled[0] < 8 * 3 and sampled[1] == 8 * 3
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-9) and history[1]["kl"] > 0
    faults(trainer)
