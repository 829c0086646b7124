"""What the parts of a run on many GPUs cost, unit by unit: driver, worker, agent loop, agreement, and records of your own loop.

`python -m benchmarks scale` prints seconds of one processor core for each unit; of agreements, seconds that pass.
A step of 256 GPUs with 8,192 samples of 32,768 tokens and 48 MoE layers of 8 experts then follows by multiplication (`step_of`),
beside what verl itself spends in the driver.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from numpy.typing import NDArray

from benchmarks import bench_verl_scale
from benchmarks.harness import peak
from mismatch_ext.rollout import (
    Provenance,
    RolloutRecord,
    SamplingSettings,
    collate,
    to_flags,
    to_ids,
    to_logprobs,
    to_records,
)
from mismatch_ext.turns import Trained, join_turns

TOKENS, LAYERS, TOP_K, EXPERTS = 32_768, 48, 8, 128
SAMPLES, GPUS, SHARING, LOOPS = 8_192, 256, 8, 8
"""Samples of a step, GPUs, ranks that share a sample's tokens under Ulysses, processes of agent loops."""
TURNS = (1, 10, 20)
RANKS = (2, 8, 16)
ROUNDS = 20
VOCABULARY = 150_000
STEP = f"a step of {GPUS} GPUs: "


def best(function: Callable[[], Any], clock: Callable[[], float] = time.process_time, rounds: int = 3) -> float:
    """Return the fewest seconds that a function took by a clock, of a few rounds."""
    seconds = []
    for _ in range(rounds):
        start = clock()
        function()
        seconds.append(clock() - start)
    return min(seconds)


def routes_of(rows: int) -> NDArray[np.uint8]:
    """Return made-up routes `[rows, LAYERS, TOP_K]` of distinct experts."""
    generator = np.random.default_rng(0)
    some = generator.random((64, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)
    return np.tile(some, (rows // 64 + 1, 1, 1))[:rows]


def tokens_of(count: int = TOKENS) -> list[int]:
    """Return made-up tokens."""
    found: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, count).tolist()
    return found


def worker(sharing: int) -> tuple[float, float]:
    """Return a worker's seconds for checking and laying out one sample's routes, when it is scored and in the update.

    So many ranks share the rows of a sample.
    """
    from mismatch_ext.adapters.verl import replay
    from mismatch_ext.adapters.verl.rollout.digests import with_digests

    tokens = tokens_of()
    routes = torch.from_numpy(with_digests(routes_of(TOKENS - 1), tokens).astype(np.int16))
    ids = torch.tensor(tokens)
    count = max(sharing, 2)
    data = {
        "input_ids": torch.nested.as_nested_tensor([ids] * count, layout=torch.jagged),
        "loss_mask": torch.nested.as_nested_tensor(
            [torch.ones(TOKENS, dtype=torch.int64)] * count, layout=torch.jagged
        ),
        replay.FIELD: torch.nested.as_nested_tensor([routes] * count, layout=torch.jagged),
    }

    class Batch(dict[str, Any]):
        def __len__(self) -> int:
            return count

    engine: Any = object.__new__(replay.EngineReplay)
    engine.config = SimpleNamespace(mode="R3")
    engine.layout = SimpleNamespace(layers=tuple(range(LAYERS)), num_experts=EXPERTS, top_k=TOP_K)
    engine.weight_version, engine.takes_older = None, False
    # As if ranks shared the samples, of which this is the first.
    shared: dict[str, Callable[..., Any]] = {
        "get_ulysses_sequence_parallel_world_size": lambda: sharing,
        "get_ulysses_sequence_parallel_rank": lambda: 0,
        "slice_input_tensor": lambda values, **_: values[: len(values) // sharing],
    }
    before = {name: getattr(replay, name) for name in shared}
    layout = replay.PassLayout(offsets=data["input_ids"].offsets(), padding=0)

    def one_pass(judged: bool) -> None:
        """Do what a pass does before the model runs, with all samples in one micro-batch."""
        batch = Batch(data)
        if judged:
            engine._judged = {}
        proofs = engine._prove(batch)
        if not judged:
            replay.other_than_recorded(proofs, replay.needed(batch))
        engine.ingest(batch, 0, proofs, judged=judged)
        if judged:
            engine._judged = dict(zip(engine._marks, proofs, strict=True))
        engine.piece(layout, list(range(count)))

    for name, stand_in in shared.items():
        setattr(replay, name, stand_in)
    try:
        scoring = best(lambda: one_pass(judged=True)) / count
        return scoring, best(lambda: one_pass(judged=False)) / count
    finally:
        for name, function in before.items():
            setattr(replay, name, function)


def agent_loop(turns: int) -> tuple[float, float]:
    """Return the seconds of the event loop for a conversation of 32,768 tokens, and those of all threads."""
    from mismatch_ext.adapters.verl.rollout import client

    tokens, length = tokens_of(), TOKENS // turns
    ends = [*range(length, TOKENS - length + 1, length), TOKENS]
    answers = [
        SimpleNamespace(
            routed_experts=routes_of(end - 1),
            token_ids=tokens[end - length // 2 : end],
            extra_fields={},
            log_probs=None,
        )
        for end in ends
    ]
    prompts = [tokens[: end - length // 2] for end in ends]

    class Server(client.Noting):
        """Answers at once, in the place of verl's client."""

        def __init__(self) -> None:
            self.left = list(answers)

        async def generate(self, *_: Any, **__: Any) -> Any:
            return self.left.pop(0)

    class Client(client.Conversing, client.Recorder, Server):  # type: ignore[misc]
        replayed = True

    kept = []  # as agent loops do: what is known of a conversation lives as long as its first answer

    async def converse() -> None:
        asking = Client()
        for prompt in prompts:
            kept.append(await asking.generate("conversation", prompt_ids=prompt, sampling_params={}))

    of_process, of_loop = time.process_time(), time.thread_time()
    asyncio.run(converse())
    return time.thread_time() - of_loop, time.process_time() - of_process


def _agree(rank: int, size: int, address: str, results: Any) -> None:
    from mismatch_ext.ranks import WORLD, gathered, together

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)

    def agreed() -> None:
        for _ in range(ROUNDS):
            with together(WORLD):
                pass

    def told() -> None:
        for _ in range(ROUNDS):
            gathered(None)

    seconds = [best(part, time.perf_counter) / ROUNDS for part in (agreed, told)]
    if rank == 0:
        results.put(seconds)
    dist.destroy_process_group()


def agreement(size: int) -> list[float]:
    """Return the seconds of one agreement of ranks over gloo, and of one gathered object."""
    context = processes.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/meet"
        ranks = [context.Process(target=_agree, args=(rank, size, address, results)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        seconds: list[float] = results.get()
        for rank in ranks:
            rank.join()
    return seconds


def spent(function: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of one call, and the largest resident size of this process during it beyond that before, in MB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from the present size
    before, start = peak(), time.process_time()
    function()
    return time.process_time() - start, peak() - before


def _own_loop(millions: float, results: Any) -> None:
    """Make records of conversations of two calls, join the calls, and lay the joined records out as a batch."""
    conversations = max(1, round(millions * 1e6 / TOKENS))
    asked, tool = 64, 512
    half = (TOKENS - asked - tool) // 2
    generator = np.random.default_rng(0)
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    logprobs: list[list[float]] = []
    rows = []
    for _ in range(conversations):
        tokens = generator.integers(0, VOCABULARY, asked + half + tool + half).tolist()
        values = (-generator.random(2 * half, dtype=np.float32)).tolist()
        middle = asked + half
        prompts += [tokens[:asked], tokens[: middle + tool]]
        responses += [tokens[asked:middle], tokens[middle + tool :]]
        logprobs += [values[:half], values[half:]]
        mask = [True] * half + [False] * tool + [True] * half
        rows.append((tokens[:asked], tokens[asked:], mask, values[:half] + [0.0] * tool + values[half:]))
    provenance = Provenance(
        engine="made up",
        engine_version="0",
        dtype="float32",
        kv_cache_dtype=None,
        weight_version=0,
        patch_digest="none",
        sampling=SamplingSettings(),
        logprobs_mode="processed_logprobs",
    )
    turns: list[RolloutRecord] = []
    joined: list[RolloutRecord] = []
    batches = []

    def make() -> None:
        turns.extend(to_records(prompts, responses, logprobs, provenance=provenance))

    def join() -> None:
        trained = [
            Trained(
                prompt_ids=to_ids(prompt, "a prompt"),
                response_ids=to_ids(response, "a response"),
                response_mask=to_flags(mask, "a response"),
                rollout_logprobs=to_logprobs(values, "a response"),
            )
            for prompt, response, mask, values in rows
        ]
        joined.extend(join_turns(turns, trained).records)

    def lay_out() -> None:
        batches.append(collate(joined))

    results.put([spent(part) for part in (make, join, lay_out)])


def own_loop(millions: float = 30.0) -> dict[str, tuple[float, float]]:
    """Return seconds and peak memory in MB of records, joins and a batch of so many million tokens, in a process of its own."""
    context = processes.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_own_loop, args=(millions, results))
    process.start()
    figures = results.get()
    process.join()
    return dict(zip(("records of two calls", "joins", "batch"), figures, strict=True))


def step_of(units: dict[str, float]) -> dict[str, float]:
    """Return the seconds of a step of 256 GPUs, from the seconds of the units; routes are replayed in two passes."""
    own = SAMPLES // GPUS
    conversations = SAMPLES / LOOPS
    return {
        "worker, routes": own * (units["worker, scoring"] + units["worker, update"]),
        f"worker, routes with Ulysses {SHARING}": own
        * SHARING
        * (units[f"worker, scoring, Ulysses {SHARING}"] + units[f"worker, update, Ulysses {SHARING}"]),
        "each process of agent loops, 20 turns": conversations * units["event loop, 20 turns"],
        "driver": SAMPLES * TOKENS / 1e6 * units["driver"],
        "driver, verl's own metrics": SAMPLES * TOKENS / 1e6 * units["driver, verl's own metrics"],
    }


def run(millions: float = 2.0, conversations: float = 30.0) -> list[dict[str, Any]]:
    """Return the rows of this benchmark; the driver's batch and the loop of your own have so many million tokens."""
    torch.set_num_threads(1)
    units: dict[str, float] = {}
    rows: list[dict[str, Any]] = []

    def note(name: str, seconds: float, unit: str) -> None:
        units[name] = seconds
        rows.append({"name": name, "unit": unit, "seconds": float(f"{seconds:.3g}")})

    # First, while this process has no threads: ranks are forked.
    for size in RANKS:
        agreed, gathered = agreement(size)
        note(f"agreement, {size} ranks", agreed, "one agreement over gloo")
        note(f"object gather, {size} ranks", gathered, "one object over gloo")
    for name, (seconds, megabytes) in own_loop(conversations).items():
        unit = f"{conversations:g} million tokens in conversations of two calls"
        note(name, seconds, unit)
        rows[-1]["megabytes"] = round(megabytes)
    for sharing, suffix in ((1, ""), (SHARING, f", Ulysses {SHARING}")):
        for of_pass, seconds in zip(("scoring", "update"), worker(sharing), strict=True):
            note(f"worker, {of_pass}{suffix}", seconds, f"a sample of {TOKENS:,} tokens on each rank that has it")
    for turns in TURNS:
        loop, threads = min(agent_loop(turns) for _ in range(3))
        note(f"event loop, {turns} turns", loop, "a conversation of 32,768 tokens")
        note(f"event loop and its threads, {turns} turns", threads, "a conversation of 32,768 tokens")
    whole = SAMPLES * TOKENS / 1e6
    driver = next(iter(bench_verl_scale.run((millions,), whole)))
    unit = f"a million tokens of {whole:.0f} million"
    note("driver", driver["ours"], unit)
    note("driver, verl's own metrics", driver["theirs"], unit)
    for name, seconds in step_of(units).items():
        note(f"{STEP}{name}", seconds, f"{SAMPLES:,} samples of {TOKENS:,} tokens")
    return rows
