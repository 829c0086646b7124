"""A step of TRL's GRPO with sampling masks, against the same step without masks and with nothing cut off, step by step in turn.

Trainers with an engine each take turns by single steps, so that a machine that slows down slows all, and nothing runs beside a
step that is timed. A rate of 0 leaves all weights as they are: whoever cuts the same off samples the same tokens, which is
checked. One more trainer makes its masks of vLLM's own objects: tokens, masks, log-probabilities, loss and gradient norm have to
be the same bit for bit. In a last step, which is not timed, Python's allocations are traced.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import tempfile
import time
import tracemalloc
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks._quiet import be_quiet
from benchmarks.bench_trl_server import STEP, TOY, Shape, reward, save

BLOCK: dict[str, Any] = {"precision": {"dtype": "float32"}, "monitor": {}}
MASKS: dict[str, Any] = {**BLOCK, "sampling_mask": {}}
KINDS = ("off", "truncated", "masks", "objects")
"""Not truncated; truncated, without masks; with masks; with masks made from one object per token that vLLM reports."""
AGAINST = {
    "off": "the same with nothing cut off",
    "truncated": "the same without masks",
    "objects": "masks made of objects",
}
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """A step, and the truncation of its sampling."""

    shape: Shape
    top_k: int
    top_p: float = 1.0


LONGER_TOY = replace(TOY, new=48)
# On a CPU, vLLM sorts the vocabulary for top_p, with or without masks, but not if there is only top_k.
CASES = {
    "toy": (Case(LONGER_TOY, 8, 0.9), Case(LONGER_TOY, 8)),
    "step": (Case(STEP, 8), Case(STEP, 8, 0.9), Case(STEP, 64)),
}
EQUAL = "tokens, masks, log-probabilities, loss and gradient norm of each step bit for bit as of vLLM's objects"


class TakesTurns(TrainerCallback):
    """Waits for its turn before each step, and reports what the step took and learnt.

    Args:
        pipe: Connection to the process that gives turns.
        steps: Number of steps; the last one is traced.
    """

    def __init__(self, pipe: Connection, steps: int) -> None:
        self.pipe, self.steps = pipe, steps
        self.began: tuple[float, float, int] | None = None
        self.scored: dict[str, Any] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the step before, and wait."""
        self._report(state)
        self.pipe.recv()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
        if state.global_step == self.steps - 1:
            tracemalloc.start()
        self.began = (time.perf_counter(), time.process_time(), memory("VmRSS"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the last step."""
        self._report(state)

    def _report(self, state: Any) -> None:
        if self.began is None:
            self.pipe.send({})
            return
        clock, processor, held = self.began
        told: dict[str, Any] = {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}
        told |= {"peak": memory("VmHWM"), "beyond": memory("VmHWM") - held}
        if tracemalloc.is_tracing():
            told["traced"] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        logs = next(entry for entry in reversed(state.log_history) if "loss" in entry)
        found = self.scored
        masks = [part for mask in found.get("sampling_mask", ()) for part in (mask.support.ids, mask.support.offsets)]
        told["tokens"] = int(found["completion_mask"].sum())
        told["sampled"] = digest([found["completion_ids"], found["sampling_per_token_logps"]])
        told["learnt"] = [digest([found["old_per_token_logps"], *masks]), logs["loss"], logs["grad_norm"]]
        self.pipe.send(told)


def memory(name: str) -> int:
    """Return a number of this process's status, in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bits of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(kind: str, case: Case, model: str, out: str, steps: int, pipe: Connection) -> None:
    """Train in its own process, one step each time it is told to."""
    shape = case.shape
    Path(out).mkdir()
    be_quiet(Path(out))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from datasets import Dataset
    from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, engine_masks, preflight

    if kind == "objects":
        for module in (engine_masks, preflight):
            vars(module)["top_logprobs"] = lambda: ()
    turns = TakesTurns(pipe, steps)

    class Trainer(MismatchGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            turns.scored = super()._generate_and_score_completions(inputs)
            return dict(turns.scored)

    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(1, shape.vocabulary, (steps * shape.prompts, shape.prompt), generator=generator)
    off = kind == "off"
    cut: dict[str, Any] = {"top_p": 1.0 if off else case.top_p, "top_k": 0 if off else case.top_k}
    trainer = Trainer(
        model=model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": " ".join(f"t{token}" for token in row)} for row in drawn.tolist()]),
        callbacks=[turns],
        args=MismatchGRPOConfig(
            output_dir=out, max_steps=steps, num_generations=8, per_device_train_batch_size=shape.micro,
            gradient_accumulation_steps=8 * shape.prompts // shape.micro, max_completion_length=shape.new, bf16=False,
            use_cpu=True, use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.05, vllm_max_model_length=512,
            logging_steps=1, save_strategy="no", report_to="none", gradient_checkpointing=False, seed=0, disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"}, learning_rate=0.0, generation_kwargs={"ignore_eos": True},
            mismatch=MASKS if kind in ("masks", "objects") else BLOCK, **cut,
        ),
    )  # fmt: skip
    trainer.train()
    pipe.close()
    os._exit(0)  # engine threads may outlive the main one


def measure(case: Case, steps: int) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the model's number of parameters, and what each kind's steps took."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    pipes: dict[str, Connection] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as standing:
        folder = Path(name)
        size = save(case.shape, folder / "model")
        for kind in KINDS:
            here, there = context.Pipe()
            given = (kind, case, str(folder / "model"), str(folder / kind), steps, there)
            child = context.Process(target=train, args=given, daemon=True)
            child.start()
            there.close()
            pipes[kind] = here
            standing.callback(here.close)  # a process whose partner has failed would wait for ever
            try:
                here.recv()  # it is built and waits for its first turn
            except EOFError:
                raise RuntimeError((folder / kind / "log.txt").read_text(encoding="utf-8")[-3000:]) from None
        for step in range(steps):
            for kind in KINDS[step % len(KINDS) :] + KINDS[: step % len(KINDS)]:
                pipes[kind].send("go")
                found[kind].append(pipes[kind].recv())
    return size, found


def rows_of(case: Case, steps: int) -> list[dict[str, Any]]:
    """Return the rows of a case: time, processor time and memory of a step."""
    size, found = measure(case, steps + 1)
    for ours, plain, objects in zip(found["masks"], found["truncated"], found["objects"], strict=True):
        assert ours["sampled"] == plain["sampled"] == objects["sampled"], "they sampled other tokens"
        assert ours["learnt"] == objects["learnt"], (ours["learnt"], objects["learnt"])
    traced = {kind: one[-1]["traced"] for kind, one in found.items()}
    timed = {kind: one[WARM_UP:-1] for kind, one in found.items()}
    tokens = median(one["tokens"] for one in timed["masks"])
    model = f"{size / 1e6:.2g} million parameters"
    cut = f"top_k {case.top_k}" + (f", top_p {case.top_p}" if case.top_p < 1 else "")
    what = f"{case.shape.name} of TRL with vLLM, {model}, {tokens} sampled tokens, {cut}"
    rows = []
    for kind, against in AGAINST.items():
        for key, unit in (
            ("clock", "clock time"), ("processor", "processor time"), ("peak", "peak memory of the process, KiB"),
            ("beyond", "peak memory beyond what was held before the step, KiB"),
        ):  # fmt: skip
            pairs = [(ours[key], theirs[key]) for ours, theirs in zip(timed["masks"], timed[kind], strict=True)]
            rows.append(
                {
                    "name": f"{what}: with masks vs {against}: {unit}",
                    "ours": median(a for a, _ in pairs),
                    "theirs": median(b for _, b in pairs),
                    "ratio": median(b / a for a, b in pairs if a),
                    "times": median(a / b for a, b in pairs if b),
                    "equal": EQUAL,
                }
            )
        rows.append(
            {
                "name": f"{what}: with masks vs {against}: most that Python has allocated, bytes for each sampled token",
                "ours": traced["masks"] / tokens,
                "theirs": traced[kind] / tokens,
                "ratio": traced[kind] / traced["masks"],
                "times": traced["masks"] / traced[kind],
                "equal": EQUAL,
            }
        )
    return rows


def run(steps: int = 5) -> list[dict[str, Any]]:
    """Return the rows of the toy's first case, for `make bench`; the other shape takes minutes."""
    return [{name: value for name, value in row.items() if name != "times"} for row in rows_of(CASES["toy"][0], steps)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="Of which two warm up.")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--case", type=int, help="One case, counted from 0.")
    chosen = parser.parse_args()
    for name, cases in CASES.items():
        for number, case in enumerate(cases):
            if chosen.only in (None, name) and chosen.case in (None, number):
                for row in rows_of(case, chosen.steps):
                    print(json.dumps(row), flush=True)
