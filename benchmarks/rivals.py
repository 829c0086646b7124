"""The same planted faults for mismatch-ext, martingale and rldoctor, and the same losses for polgrad: who names what.

    python -m benchmarks.rivals --json runs/rivals.json
    python -m benchmarks.rivals logs --only top_p mask --verbose
    python -m benchmarks.rivals first                             # ours alone, on the mismatch faults of the first comparison

Each rival is installed from the package index into a temporary environment, which also sees the packages of this one. A record
that exists is added to, so that the parts can run one by one. `LOGS` and `LIVE` list what counts as an answer.
"""

from __future__ import annotations

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import argparse
import datetime
import json
import math
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
from mismatch_ext.adapters import cli
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.sides import Run
from mismatch_ext.adapters.transformers.doctor.models import load_model, routing_shape
from mismatch_ext.adapters.transformers.scoring import score_tokens
from tqdm import tqdm

from examples.arithmetic.task import make_dataset, reward
from examples.arithmetic.tokenizer import EOS_ID, encode, make_tokenizer
from mismatch_ext.doctor import Sample, write_rollouts
from mismatch_ext.rollout import Provenance, RolloutRecord, SamplingSettings
from mismatch_ext.versions import installed
from tests.peers.doctor import faults
from tests.peers.doctor.faults import Planted

OURS = "mismatch-ext"
PACKAGES = {"martingale": "martingale[trl]==0.2.0", "rldoctor": "rldoctor==0.2.0", "polgrad": "polgrad==0.2.1"}
RIVALS = ("martingale", "rldoctor")
FIELDS = {OURS: "ours", **dict(zip(RIVALS, RIVALS, strict=True))}
PROMPTS, OF_EACH, TOKENS, TURN, CUT = 32, 4, 112, 12, 16
Said = list[list[str]]  # name and sentence of each thing that a tool says
Row = dict[str, Any]

# The sentences of martingale's closed list that name a cause, by a part of each, and alarms that say the same.
SENTENCES = {
    "weights or input": "DIFFERENT WEIGHTS (or a different input)",
    "bf16 tail": "the bf16-vs-fp32 tail effect",
    "dtype, sampler or weights": "Check dtype, sampler settings",
    "staleness": "Staleness dominates",
    "older weights": "ENGINE GENERATED FROM THE REFERENCE WEIGHTS",
}
ALARMS = {"stale_server": "weights or input", "weights_unchanged": "no update"}
NAMING = {*SENTENCES, *ALARMS.values()}
# Its README: "engine config, dtype or server settings changed".
CHANGED = ("dtype, sampler or weights", "floor_jump")
# A log without training always stands still, and its rewards say nothing of the gap.
REWARDS = {"plateau", "advantage_collapse", "reward_hacking", "reward_composition"}
# What is said without a name: notes, and that a batch of a run was examined.
UNNAMED = {"note", "inspect", "doctor"}


class Answers(NamedTuple):
    """Names that are right, and names that are right in part, of one tool."""

    right: Collection[str] = ()
    partly: Collection[str] = ()


class Log(NamedTuple):
    """A planted fault as logged rollouts, and what counts as an answer; a clean log has no answers of ours."""

    planted: Planted
    ours: Answers = Answers()
    martingale: Answers = Answers()
    rldoctor: Answers = Answers()
    edit: Callable[[Sample], Sample] | None = None
    tools: bool = False  # whether each response has a tool's turn
    versions: bool = False  # whether half of the responses are of older weights


def edited(change: Callable[..., Any], *columns: str) -> Callable[[Sample], Sample]:
    """Return an edit of a sample that changes each row of some columns."""
    return lambda sample: replace(
        sample, **{name: tuple(tuple(change(row)) for row in getattr(sample, name)) for name in columns}
    )


def one(key: str) -> Answers:
    return Answers((key,))


KINDS = (faults.CLEAN, faults.REQUESTS, faults.PROMPT, faults.HIDDEN, faults.CONFIG, faults.WEIGHTS, faults.EXPERTS)
F = dict(chain.from_iterable(kind.items() for kind in KINDS))
SAMPLED = Answers((), CHANGED)
INPUT = Answers((), ("weights or input",))
MASK = one("mask")
LOGS = {
    "clean": Log(F["clean"]),
    "clean, a tool's turn": Log(F["clean"], tools=True),
    "temperature 0.94": Log(F["temperature 0.94, trainer 1"], one("temperature"), SAMPLED),
    "top_p 0.88": Log(F["top_p 0.88"], one("top_p"), SAMPLED),
    "top_k 4": Log(F["top_k 4"], one("top_k"), SAMPLED),
    "min_p 0.07": Log(F["min_p 0.07"], one("min_p"), SAMPLED),
    "repetition_penalty 1.07": Log(F["repetition_penalty 1.07"], one("repetition_penalty"), SAMPLED),
    "logit_bias 0.6": Log(F["logit_bias of 0.6"], one("logit_bias"), SAMPLED),
    "prompt's first token twice": Log(F["a prompt's first token twice"], one("extra_token"), INPUT),
    "prompt lacks 2 tokens": Log(F["a prompt without its first 2 tokens"], one("missing_first"), INPUT),
    "log-probabilities of the next token": Log(
        Planted(), one("shifted"), edit=edited(lambda row: (*row[1:], row[-1]), "logprobs")
    ),
    "tool mask a token late": Log(Planted(), MASK, edit=edited(lambda mask: (True, *mask[:-1]), "masks"), tools=True),
    "mask starts a token late": Log(Planted(), MASK, edit=edited(lambda mask: (False, *mask[1:]), "masks")),
    "responses cut at 16 tokens": Log(
        Planted(), one("cut"), rldoctor=one("length_pathology"),
        edit=edited(lambda row: row[:CUT], "responses", "masks", "logprobs"),
    ),
    "top_p 0.9, raw log-probabilities": Log(F["top_p 0.9, raw log-probabilities"], one("top_p"), SAMPLED),
    "rope_theta x 1.13": Log(F["rope_theta x 1.13"], one("rope_theta"), Answers((), ("floor_jump",))),
    "fp8 weights": Log(F["fp8 weights"], one("weights_fp8"), SAMPLED),
    "stale weights, one of three": Log(
        F["the last of three older checkpoints"], one("stale_weights"), Answers(("older weights", "weights or input"), CHANGED)
    ),
    "half of the responses two versions old": Log(
        Planted(older=(faults.moved(by=3e-3),)), one("staleness"), one("staleness"), versions=True
    ),
    "norm epsilon x 43, float16": Log(F["norm epsilon x 43, float16"], one("norm_eps"), Answers((), ("floor_jump",))),
    "engine float16, trainer bfloat16": Log(
        F["engine float16, trainer bfloat16"], one("trainer_dtype"), Answers(("bf16 tail",), CHANGED)
    ),
    "clean, float32": Log(F["clean, float32"]),
    "expert weights not normalized": Log(F["chosen experts not normalized"], one("expert_norm"), Answers((), ("floor_jump",))),
}  # fmt: skip
# Ours is asked these too, and the rivals of today are not.
OURS_ALONE = {
    "stale weights, ten steps": Log(Planted(older=(faults.moved(seed=1), faults.moved(by=1e-2))), one("stale_weights")),
}
FIRST = (
    "temperature 0.94", "top_p 0.88", "repetition_penalty 1.07", "stale weights, one of three", "stale weights, ten steps",
    "rope_theta x 1.13", "prompt's first token twice", "prompt lacks 2 tokens", "log-probabilities of the next token",
    "tool mask a token late", "half of the responses two versions old",
)  # fmt: skip
LIVE: dict[str, tuple[dict[str, Any], dict[str, Answers]]] = {
    "clean": ({}, {}),
    "top_p 0.9": ({"top_p": 0.9}, {OURS: Answers(("top_p", "ratio_bias")), "martingale": SAMPLED}),
    "requests at temperature 0.9": (
        {"generation_kwargs": {"temperature": 0.9}}, {OURS: one("ConfigError"), "martingale": SAMPLED}
    ),
    "updates stop reaching the engine": (
        {"learning_rate": 1e-3, "keeps_weights": True},
        {OURS: Answers(("weight_sync", "WeightSyncError")), "martingale": one("weights or input")},
    ),
    "an optimizer that moves nothing": (
        {"learning_rate": 0.0},
        {OURS: one("weights_still"), "martingale": one("no update"), "rldoctor": one("gradient_pathology")},
    ),
    "responses cut at 16 tokens": (
        # Its answers have no end, so that no reward differs and nothing moves: what says so is right in part.
        {"max_completion_length": CUT},
        {
            OURS: Answers(("cut",), ("weights_still",)), "martingale": Answers((), ("no update",)),
            "rldoctor": Answers(("length_pathology",), ("gradient_pathology",)),
        },
    ),
}  # fmt: skip


def judged(tool: str, said: Said, clean: bool, answers: Answers) -> str:
    """Return right, partly, wrong or silent; beside a right name another cause leaves it partly right."""
    names = {name for name, _ in said}
    causes = names & NAMING if tool == "martingale" else names - REWARDS - UNNAMED - {"cut"}
    if clean:
        return "wrong" if names - REWARDS - UNNAMED else "right"
    right, others = names & set(answers.right), causes - {*answers.right, *answers.partly}
    if others:
        return "partly" if right else "wrong"
    return "right" if right else "partly" if names & set(answers.partly) else "silent"


def sampled(log: Log, folder: Path, engines: faults.Engines) -> tuple[Run, Sample, list[int]]:
    """Plant a fault and sample; return the run, what a log of it holds, and the weight version of each response."""
    folder.mkdir()
    run, prompts, seen = faults.plant(log.planted, folder, engines)
    shape = routing_shape(load_model(run.model))

    def of(run: Run, prompts: Any, count: int, tokens: int, seen: Any = None) -> Sample:
        asked = ToSample(prompts=prompts, responses=count, max_tokens=tokens, sampling=run.sampling, seen=seen)
        return run.start(shape).sample(asked)

    prompts, seen, count = prompts[:PROMPTS], None if seen is None else seen[:PROMPTS], PROMPTS * OF_EACH
    sample = of(run, prompts, count, TURN if log.tools else TOKENS, seen)
    if log.tools:
        tool = tuple(encode("=7+2="))
        turns = [[*p, *r, *tool] for p, r in zip(sample.prompts, sample.responses, strict=True)]
        rest = of(run, turns, count, TOKENS - TURN)
        inserted = {"responses": tool, "masks": (False,) * len(tool), "logprobs": (0.0,) * len(tool)}
        whole = {
            name: tuple((*a, *part, *b) for a, b in zip(getattr(sample, name), getattr(rest, name), strict=True))
            for name, part in inserted.items()
        }
        sample = replace(sample, **whole)
    versions = [3] * count
    if log.versions:
        run = replace(run, engine_model=None, older=())
        new = of(run, prompts, count, TOKENS)
        half = range(0, count, 2)
        sample, versions = Sample.joined([sample.part(half), new.part(half)]), [1] * len(half) + [3] * len(half)
    return run, log.edit(sample) if log.edit else sample, versions


def scored(run: Run, sample: Sample) -> list[list[float]]:
    """Return the trainer's log-probabilities of all tokens of each response, as its forward pass computes them."""
    model, dtype = load_model(run.model), getattr(torch, run.trainer_dtype)
    autocast = partial(torch.autocast, "cpu", dtype=dtype, enabled=dtype != torch.float32)
    pairs = zip(sample.prompts, sample.responses, strict=True)
    return [score_tokens(model, torch.tensor([[*p, *r]]), autocast)[0, len(p) - 1 :].tolist() for p, r in pairs]


def ours(log: Log, run: Run, sample: Sample, versions: Sequence[int], folder: Path) -> Said:
    """Return what `mismatch-ext doctor --rollouts` says of a log."""
    columns = zip(sample.prompts, sample.responses, sample.logprobs, sample.masks, versions, strict=True)
    known = Provenance(
        engine="vllm", engine_version=installed("vllm") or "", dtype=run.dtype, kv_cache_dtype=None, weight_version=0,
        patch_digest="none", sampling=SamplingSettings(), logprobs_mode="processed_logprobs",
    )  # fmt: skip
    records = [
        RolloutRecord(
            prompt_ids=p, response_ids=r, rollout_logprobs=e, response_mask=m, finish_reason=None,
            provenance=replace(known, weight_version=v),
        )
        for p, r, e, m, v in columns
    ]  # fmt: skip
    write_rollouts(records, folder / "rollouts.jsonl")
    asked = ["doctor", "--model", run.model, "--rollouts", str(folder / "rollouts.jsonl"), "--out", str(folder)]
    asked += ["--trainer-dtype", run.trainer_dtype] if run.trainer_dtype != run.dtype else []
    asked += [part for path in run.older for part in ("--older", path)]
    with (folder / "ours.txt").open("w") as text, redirect_stdout(text), redirect_stderr(text):
        cli.main(asked)
    if not (folder / "doctor.json").exists():
        error = (folder / "ours.txt").read_text("utf-8").splitlines()[-1]
        return [["error", error]]
    found, planted = json.loads((folder / "doctor.json").read_text("utf-8")), log.planted
    named, (low, high) = [], planted.near or (-math.inf, math.inf)
    for cause in found["causes"]:
        exact = low <= cause["parameter"] <= high and planted.said in cause["said"]
        key = cause["key"] if exact or cause["key"] not in planted.expected else f"another {cause['key']}"
        named.append([key, cause["said"]])
    said = {"cut": "are cut at", "staleness": "staleness: "}
    notes = [[next((name for name, part in said.items() if part in note), "note"), note] for note in found["notes"]]
    return [*named, *notes, ["note", (folder / "ours.txt").read_text("utf-8").splitlines()[-3]]]


def martingales(bin: Path, run: Run, rows: list[Any], clean: list[Any], folder: Path) -> tuple[Said, float]:
    """Return what martingale's doctor, live alarms and, where older weights are known, `recompute` say, and the seconds."""
    sampler = {
        "temperature": run.temperature, "top_p": 1.0, "dtype": run.dtype, "engine": "vllm",
        "logprobs_mode": "processed_logprobs", "temperature_applied": True,
    }  # fmt: skip
    asked = {"sampler": sampler, "rows": rows, "clean": clean, "doctor": f"{folder}/record", "alarms": f"{folder}/live"}
    said = [[ALARMS.get(kind, kind), message] for kind, message in inside(bin, "record", asked, folder)]
    began = cpu_seconds()
    text = spoken(bin / "martingale", "doctor", "--dir", f"{folder}/record")
    for path in run.older[-1:]:
        text += spoken(bin / "martingale", "recompute", "--dir", f"{folder}/record", "--model", path)
    seconds = cpu_seconds() - began
    lines = [line for line in text.splitlines() if line.startswith(("- ", "| 3")) and "Only lag-0" not in line]
    said += [[next((name for name, part in SENTENCES.items() if part in line), "inspect"), line] for line in lines]
    return said, seconds


def rldoctors(bin: Path, sample: Sample, scores: list[list[float]], folder: Path) -> tuple[Said, float]:
    """Return what rl-doctor says of the metrics that TRL would log, eight responses a step."""
    decode, problems = make_tokenizer().decode, make_dataset(faults.PROMPTS, seed=5000)
    rows = zip(sample.responses, sample.logprobs, scores, sample.masks, strict=True)
    parts = [
        {
            "reward": reward([decode([t for t in r if t != EOS_ID])], *([problems[at // OF_EACH][x]] for x in ("a", "b")))[0],
            "completions/mean_length": float(len(r)), "completions/clipped_ratio": float(r[-1] != EOS_ID),
            "entropy": -sum(s) / len(s), "clip_ratio/region_mean": 0.0,
            "sampling/sampling_logp_difference/mean": sum(abs(x - y) for x, y, z in zip(e, s, m, strict=True) if z) / len(r),
        }
        for at, (r, e, s, m) in enumerate(rows)
    ]  # fmt: skip
    lines, step = [], 2 * OF_EACH
    for first in range(0, len(parts), step):
        here = parts[first : first + step]
        spread = torch.tensor([part["reward"] for part in here]).view(-1, OF_EACH).std(1)
        means = {name: sum(part[name] for part in here) / len(here) for name in here[0]}
        groups = {"reward_std": float(spread.mean()), "frac_reward_zero_std": float((spread == 0).double().mean())}
        lines.append(json.dumps({"step": first // step, **means, **groups}))
    (folder / "trl.jsonl").write_text("\n".join(lines), encoding="utf-8")
    began = cpu_seconds()
    found = json.loads(spoken(bin / "rl-doctor", "diagnose", str(folder / "trl.jsonl"), "--format", "json"))
    told = [[f["detector"], f["summary"]] for f in found["findings"] if f["severity"] in ("WARNING", "CRITICAL")]
    return told, cpu_seconds() - began


def cpu_seconds() -> float:
    """Return what this process and its children have computed so far; other jobs of the machine do not count."""
    return sum(os.times()[:4])


def spoken(*command: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr[-4000:]}")
    return done.stdout


def inside(bin: Path, what: str, asked: Any, folder: Path) -> Any:
    """Ask `benchmarks.rivals_inside` in a rival's environment."""
    (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    spoken(bin / "python", "-m", "benchmarks.rivals_inside", what, folder / "asked.json", folder / "answer.json")
    return json.loads((folder / "answer.json").read_text("utf-8"))


def environment(tools: Sequence[str], folder: Path) -> Path:
    """Install rivals into an environment that also sees the packages of this one; return the folder of its commands."""
    folder = folder / "-".join(tools)
    if not folder.exists():
        spoken(sys.executable, "-m", "venv", folder)
        (packages,) = folder.glob("lib/python3*/site-packages")
        (packages / "shared.pth").write_text(
            f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", "utf-8"
        )
        spoken(folder / "bin/pip", "install", "--quiet", *(PACKAGES[tool] for tool in tools))
    return folder / "bin"


def of_logs(names: Sequence[str], home: Path, environments: Path, tools: Collection[str]) -> Iterator[Row]:
    """Yield a row for each log and tool."""
    engines, bin = faults.Engines(), environment(RIVALS, environments) if len(tools) > 1 else Path()
    clean: dict[tuple[str, str, bool], list[Any]] = {}  # what rivals learn a clean run from, by model and dtype
    for number, name in enumerate(tqdm(names, file=sys.stderr)):
        log, folder = (LOGS | OURS_ALONE)[name], home / f"log{number}"
        answers: dict[str, tuple[Said, float]] = {}
        if len(tools) > 1:
            dtype = log.planted.run.get("trainer_dtype", "bfloat16")
            if (key := (log.planted.kind, dtype, log.tools)) not in clean:
                sound = Planted(kind=log.planted.kind, run={"dtype": dtype, "trainer_dtype": dtype})
                clean[key] = recorded(*sampled(Log(sound, tools=log.tools), home / f"{folder.name} clean", engines))[0]
        run, sample, versions = sampled(log, folder, engines)
        if len(tools) > 1:
            parts, scores = recorded(run, sample, versions)
            answers["martingale"] = martingales(bin, run, parts, clean[key], folder)
            answers["rldoctor"] = rldoctors(bin, sample, scores, folder)
        began = cpu_seconds()
        said = ours(log, run, sample, versions, folder)
        answers[OURS] = said, cpu_seconds() - began
        for tool in tools:
            yield answered(
                "logs" if len(tools) > 1 else "first", name, tool, *answers[tool], getattr(log, FIELDS[tool])
            )
    engines.end()


def recorded(run: Run, sample: Sample, versions: Sequence[int]) -> tuple[list[Any], list[list[float]]]:
    """Return the rows of a record, of the tokens that the mask counts, and the trainer's scores of all tokens."""
    scores = scored(run, sample)
    columns = zip(sample.prompts, sample.responses, sample.logprobs, scores, versions, sample.masks, strict=True)
    return [[p, *(list(compress(part, m)) for part in (r, e, t)), v] for p, r, e, t, v, m in columns if any(m)], scores


def answered(part: str, fault: str, tool: str, said: Said, seconds: float, answers: Answers) -> Row:
    verdict = judged(tool, said, fault.startswith("clean"), answers)
    return {"part": part, "fault": fault, "tool": tool, "verdict": verdict, "seconds": seconds, "said": said}


def of_live(names: Sequence[str], home: Path, environments: Path) -> Iterator[Row]:
    """Yield a row for each live run and tool, all with the TRL that martingale pins; the rivals share their runs."""
    bin = environment(RIVALS, environments)
    trl = spoken(bin / "python", "-c", "from importlib.metadata import version; print(version('trl'))").strip()
    for tool in (OURS, "rivals"):
        (folder := home / f"live {tool}").mkdir()
        asked = {"tool": tool, "out": str(folder), "faults": {name: LIVE[name][0] for name in names}}
        began = cpu_seconds()
        answers = inside(bin, "live", asked, folder)
        seconds = (cpu_seconds() - began) / len(names)
        for name, answer in answers.items():
            for asked_tool, told in answer.items():
                said = [[ALARMS.get(key, key), text] for key, text in told]
                row = answered("live", name, asked_tool, said, seconds, LIVE[name][1].get(asked_tool, Answers()))
                yield row | {"trl": trl}


def of_losses(home: Path, environments: Path) -> Iterator[Row]:
    """Yield a row for each loss that polgrad's pytest plugin compared with ours."""
    page = home / "polgrad.xml"
    command = ["-m", "pytest", "-q", "-c", os.devnull, "-o", "junit_family=xunit1", "-p", "no:cacheprovider"]
    command += ["--junitxml", str(page), "benchmarks/rivals_polgrad.py"]
    subprocess.run([str(environment(["polgrad"], environments) / "python"), *command], stdout=subprocess.DEVNULL)
    for case in ElementTree.parse(page).iter("testcase"):
        difference = {p.get("name"): float(p.get("value", "nan")) for p in case.iter("property")}.get(
            "difference", math.nan
        )
        verdict = "differs" if case.find("failure") is not None or case.find("error") is not None else "agrees"
        name = re.sub(r".*\[(.*)\]", r"\1", case.get("name", ""))
        said = [["difference", f"{difference:.1e}"]]
        yield {"part": "losses", "fault": name, "tool": "polgrad", "verdict": verdict, "said": said,
               "seconds": float(case.get("time", "nan"))}  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Return the verdicts by fault, their counts, and the median CPU seconds of a log or run, by tool."""
    lines = []
    for part in [part for part in ("logs", "first", "live") if any(row["part"] == part for row in rows)]:
        here = [row for row in rows if row["part"] == part]
        verdicts = {(row["fault"], row["tool"]): row["verdict"] for row in here}
        tools = [tool for tool in FIELDS if any(row["tool"] == tool for row in here)]
        lines += [f"| {part} | {' | '.join(tools)} |", "|---" * (1 + len(tools)) + "|"]
        for fault in dict.fromkeys(row["fault"] for row in here):
            lines.append(f"| {fault} | {' | '.join(verdicts[fault, tool] for tool in tools)} |")
        for word in ("right", "partly", "silent", "wrong"):
            counts = [sum(row["verdict"] == word for row in here if row["tool"] == tool) for tool in tools]
            lines.append(f"| {word} | {' | '.join(map(str, counts))} |")
        seconds = [median(row["seconds"] for row in here if row["tool"] == tool) for tool in tools]
        lines.append(f"| median CPU seconds | {' | '.join(f'{x:.1f}' for x in seconds)} |")
    losses = [row for row in rows if row["part"] == "losses"]
    lines += ["| loss and gradient | polgrad | largest relative difference |", "|---|---|---|"] if losses else []
    return "\n".join(lines + [f"| {row['fault']} | {row['verdict']} | {row['said'][0][1]} |" for row in losses])


def main() -> None:
    """Run the parts that are asked for, print the table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="logs, live or losses (default: all), or first")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="faults whose names hold one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record, which is added to if it exists")
    parser.add_argument("--environments", type=Path, metavar="DIR", help="where rivals stay installed from run to run")
    parser.add_argument("--verbose", action="store_true", help="print what each tool said")
    asked = parser.parse_args()
    parts = asked.parts or ["logs", "live", "losses"]
    logs, live = ([name for name in names if any(word in name for word in asked.only)] for names in (LOGS, LIVE))
    record = {"rows": []} if not asked.json or not asked.json.exists() else json.loads(asked.json.read_text("utf-8"))
    versions = {name: installed(name) for name in (OURS, "vllm", "torch", "transformers")} | PACKAGES
    record |= {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "versions": versions}
    with tempfile.TemporaryDirectory() as home:
        where = {"home": Path(home), "environments": asked.environments or Path(home)}
        first = partial(of_logs, [name for name in FIRST if any(word in name for word in asked.only)], tools=(OURS,))
        rivals = {"logs": partial(of_logs, logs, tools=FIELDS), "live": partial(of_live, live), "losses": of_losses}
        runs = {"first": first, **rivals}
        for row in chain.from_iterable(run(**where) for part, run in runs.items() if part in parts):
            same = ("part", "fault", "tool")
            record["rows"] = [old for old in record["rows"] if any(old[key] != row[key] for key in same)] + [row]
            versions |= {"trl": row["trl"]} if "trl" in row else {}
            if asked.json:
                asked.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
            if asked.verbose:
                print(f"{row['fault']}: {row['tool']}: {row['verdict']}, {row['seconds']:.1f} s")
                print(*(f"    {name}: {text}" for name, text in row["said"]), sep="\n", flush=True)
    print(record["date"], f"{record['cores']} CPU cores", versions, table(record["rows"]), sep="\n")


if __name__ == "__main__":
    main()
