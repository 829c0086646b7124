"""Every feature once on SmolLM2-135M-Instruct, by the command that its user would type, each in a process of its own.

    python -m examples.real_flows                                # all of them, in about an hour on two busy CPU cores
    python -m examples.real_flows --only fp16 lora               # some of them, again
    python -m examples.real_flows --record evidence/real.json    # writes what docs/real.md shows

A flow that ends leaves a line in `runs/real_flows/flows.jsonl` with its command, minutes, peak memory, and what it printed. The
next call leaves out the flows that passed, so that a call that was ended goes on where it was. A flow passes if it ends with the
status that is expected of it and prints what is looked for.

`make real` installs what the flows need.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# When run as a file, Python would look for modules only in examples/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.harness import measured_on
from examples import chat, smollm2
from tests.rendezvous import rendezvous

ROOT = Path(__file__).resolve().parents[1]
WORK = Path("runs/real_flows")
MODEL = "runs/models/smollm2"
MIXTURE = "runs/models/smollm2-4-experts"
FOUR_LAYERS = "runs/models/smollm2-4-layers"
QUESTIONS = WORK / "questions"
LIMIT = 1800
"""Seconds after which a flow is ended; beside other jobs on two cores each took up to nine minutes."""
SAMPLED_EVERY = 1.0
"""Seconds between two looks at a flow's memory."""

RUN_ENDED = r"mismatch-ext: .*completed after \d+ steps?"
GAP = r"mean \|Δlogp\| .* nats? per token.*"
SCRIPT_BEGINS = 'import os\nos.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"\n'
SMALL_RUN = (
    "use_cpu=True, max_steps=1, per_device_train_batch_size=8, max_completion_length=32, vllm_max_model_length=256, "
    "vllm_gpu_memory_utilization=0.25, gradient_checkpointing=False, logging_steps=1, report_to='none', "
)
"""What a page's script is given to end soon on two CPU cores."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What a user types, and what shows that it worked.

    Args:
        name: What `--only` takes; also the folder below `runs/real_flows`.
        title: What the flow shows, as a row of a table says it.
        command: The words of the command.
        prints: Regular expressions of lines that must be printed; the first match of each is kept.
        statuses: Exit statuses that are allowed.
        script: A page whose Python block the command runs, with the model and the sizes replaced; None runs no page.
    """

    name: str
    title: str
    command: Sequence[str]
    prints: Sequence[str] = (RUN_ENDED, GAP)
    statuses: Sequence[int] = (0,)
    script: PageScript | None = None


@dataclass(frozen=True, kw_only=True)
class PageScript:
    """A Python block of a page, made to run here.

    Args:
        page: The page, relative to the repository.
        needs: A line that only this block has.
        first: Another block of a page that stands before it, by page and line; None where the block is whole.
    """

    page: str
    needs: str
    first: tuple[str, str] | None = None

    def text(self, folder: Path) -> str:
        """Return the script, with SmolLM2 as the model and small sizes.

        Args:
            folder: Folder of the run.

        Raises:
            ValueError: The page has changed, so that a word to replace is missing.
        """
        block = block_of(self.page, self.needs)
        for there, here in (
            ('"Qwen/Qwen3-0.6B"', f'"{MODEL}"'),
            ('output_dir="run"', f'output_dir="{folder}"'),
            ("use_vllm=True,", f"use_vllm=True, {SMALL_RUN}"),
            ("use_vllm=True)", f"use_vllm=True, {SMALL_RUN})"),
        ):
            if there not in block and not there.startswith("use_vllm"):
                raise ValueError(
                    f"{self.page} has no {there} in the block with {self.needs!r}. Change examples/real_flows.py."
                )
            block = block.replace(there, here)
        before = "" if self.first is None else block_of(*self.first).partition("\nargs = ")[0]
        # Without it, vLLM's process would outlive the script.
        return f"{SCRIPT_BEGINS}{before}\n{block}\nos._exit(0)\n"


def block_of(page: str, needs: str) -> str:
    """Return the one Python block of a page that has a line."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    (found,) = [block for block in blocks if needs in block]
    return str(found)


def trains(name: str, title: str, block: Mapping[str, Any], *more: str, model: str = MODEL, **other: Any) -> Flow:
    """Return a flow that trains for a step or two with TRL and vLLM.

    Args:
        name: As for `Flow`.
        title: As for `Flow`.
        block: The `mismatch` config.
        more: Arguments of TRL's that differ from `examples/configs/smollm2.yaml`.
        model: The checkpoint.
        other: Further fields of the flow.
    """
    command = [
        "python", "-m", "examples.trl_grpo", "--config", "examples/configs/smollm2.yaml",
        "--model_name_or_path", model, "--output_dir", str(WORK / name), "--eval_prompts", "0", "--max_steps", "1",
        "--max_completion_length", "32", "--mismatch", json.dumps(block), *more,
    ]  # fmt: skip
    return Flow(name=name, title=title, command=command, **other)


ASKS = ("--responses", "16", "--max-tokens", "16", "--engine-arg", "max_model_len=512")
"""Sizes for commands that sample by themselves."""
CHATS = ("--dataset", str(QUESTIONS))
FP16 = {"dtype": "float16", "init_scale": 4096.0}

FLOWS = (
    Flow(
        name="quick-start",
        title="README's script",
        command=["python", f"{WORK}/quick-start.py"],
        script=PageScript(page="README.md", needs="MismatchGRPOTrainer"),
    ),
    Flow(
        name="attach",
        title="`attach` to TRL's own trainer",
        command=["python", f"{WORK}/attach.py"],
        script=PageScript(
            page="docs/trl.md", needs="attach(trainer)", first=("README.md", "dataset = Dataset.from_list")
        ),
    ),
    trains("fp16", "FP16 on both sides", {"precision": FP16}),
    Flow(
        name="lora",
        title="LoRA, by TRL's own script",
        command=[
            "mismatch-ext", "trl", "grpo", "--model_name_or_path", MODEL, "--dataset_name", str(QUESTIONS),
            "--reward_funcs", "examples.chat.reward", "--output_dir", f"{WORK}/lora", "--use_peft", "--lora_r", "8",
            "--lora_target_modules", "q_proj", "v_proj", "--max_steps", "2", "--learning_rate", "1e-4",
            "--use_vllm", "--vllm_mode", "colocate", "--vllm_max_model_length", "512",
            "--vllm_gpu_memory_utilization", "0.25", "--use_cpu", "--per_device_train_batch_size", "8",
            "--max_completion_length", "32", "--gradient_checkpointing", "False", "--logging_steps", "1",
            "--report_to", "none", "--save_strategy", "no", "--mismatch", '{"precision": {"dtype": "float32"}}',
        ],
    ),
    trains("correction-token", "Preset `token_truncate`", {"correction": {"preset": "token_truncate"}}),
    trains(
        "correction-sequence",
        "Preset `seq_mis`",
        {"correction": {"preset": "seq_mis"}},
        # The configuration file has another mode, and a preset that contradicts TRL's own setting is refused.
        *("--vllm_importance_sampling_mode", "sequence_mask"),
    ),
    trains("kl-loss", "KL in the loss", {"kl": {"coef": 0.05, "estimator": "k2", "placement": "loss"}}),
    trains("kl-reward", "KL in the reward", {"kl": {"coef": 0.05}}),
    trains(
        "top-p",
        "Masks for top-p over 49,152 tokens",
        {"precision": {"dtype": "float32"}, "sampling_mask": {}},
        *("--top_p", "0.95", "--top_k", "64"),
    ),
    trains(
        "length-rule",
        "Learning rate by response length",
        {"lr": {"period": 1}},
        *("--max_steps", "2", "--lr_scheduler_type", "cosine"),
    ),
    Flow(
        name="run",
        title="Your own loop with `Run`",
        command=[
            "python", "-m", "examples.loop", "--steps", "1", "--prompts", "1", "--model_name_or_path", MODEL,
            "--output_dir", f"{WORK}/run", "--mismatch",
            json.dumps({"precision": {"dtype": "float32"}, "correction": {"preset": "tis"}, "kl": {"coef": 0.02}, "lr": {}}),
        ],
        prints=(r"step 1: .*weights in_sync", RUN_ENDED, GAP),
    ),
    Flow(
        name="tools",
        title="Tools, two calls and an answer, with the chat template",
        command=["python", "-m", "examples.tools", "--output_dir", f"{WORK}/tools"],
        prints=(r"turns of each completion: \[3, 3, 3, 3\].*", RUN_ENDED, GAP),
    ),
    trains(
        "long-answers",
        "Two answers of 2,000 tokens",
        {"precision": {"dtype": "bfloat16"}},
        *("--max_completion_length", "2000", "--vllm_max_model_length", "2304", "--per_device_train_batch_size", "2"),
        *("--num_generations", "2", "--generation_kwargs", '{"ignore_eos": true}'),
    ),
    Flow(
        name="doctor-clean",
        title="Doctor, equal settings",
        command=["mismatch-ext", "doctor", "--model", MODEL, *CHATS, "--quick", "--out", f"{WORK}/doctor-clean", *ASKS],
        prints=(r"Clean: what is left is rounding.*",),
    ),
    Flow(
        name="doctor-penalty",
        title="Doctor, an engine with a repetition penalty",
        command=[
            "mismatch-ext", "doctor", "--model", MODEL, *CHATS, "--quick", "--out", f"{WORK}/doctor-penalty", *ASKS,
            "--dtype", "float32", "--sampling", "repetition_penalty=1.05",
        ],
        prints=(r"the engine samples with repetition_penalty 1\.0\d+ .*cause, confirmed.*",),
        statuses=(1,),
    ),
    Flow(
        name="gate",
        title="Gate, float32",
        command=[
            "mismatch-ext", "gate", "--model", MODEL, "--dtype", "float32", *CHATS, "--quick",
            "--responses", "8", "--max-tokens", "16", "--json", f"{WORK}/gate.json",
        ],
        prints=(r".*\bpassed\b.*",),
    ),
    trains("r3-bf16", "Replay on the mixture of experts, bf16", {"routing": {"mode": "R3", "measured": 1.0}}, model=MIXTURE),
    trains(
        "r3-float32",
        "Replay on the mixture of experts, float32",
        {"precision": {"dtype": "float32"}, "routing": {"mode": "R3", "measured": 1.0}},
        model=MIXTURE,
    ),
    Flow(
        name="verl",
        title="verl's `main_ppo`, FP16, the first four layers",
        command=[
            "python", "-m", "examples.verl_cpu", "+mismatch.precision.dtype=float16",
            f"actor_rollout_ref.model.path={ROOT / FOUR_LAYERS}", "actor_rollout_ref.model.custom_chat_template=null",
            "data.max_prompt_length=64", "actor_rollout_ref.rollout.max_model_len=128",
            # The embedding has 113 MB, and verl sends no tensor in pieces.
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=128",
        ],
        prints=(r"step 2: .*logp_abs_diff_mean .*",),
    ),
    Flow(
        name="report",
        title="Report of all these runs",
        command=["mismatch-ext", "report", str(WORK)],
        prints=(r".*report\.html",),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a flow ended.

    Args:
        name: The flow's.
        title: The flow's.
        command: What was typed.
        status: `passed`, `failed`, `timed out` or `not run`.
        minutes: Wall-clock time.
        peak_gb: Largest sum of the resident sizes of its processes, pages that they share counted once.
        said: Lines that it printed, those that the flow looks for.
        why: What was wrong, and the end of the output; empty if it passed.
        date: Day, of UTC.
        commit: Commit of the repository.
    """

    name: str
    title: str
    command: str
    status: str
    minutes: float
    peak_gb: float
    said: list[str] = field(default_factory=list)
    why: str = ""
    date: str = ""
    commit: str | None = None


def _typed(flow: Flow) -> str:
    """Return the command as a user types it at the root of a clone, without this machine's folders."""
    return shlex.join(flow.command).replace(f"{ROOT}/", "")


def not_run(flow: Flow) -> Outcome:
    """Return what is known of a flow that has not been run."""
    return Outcome(name=flow.name, title=flow.title, command=_typed(flow), status="not run", minutes=0.0, peak_gb=0.0)


def memory_of(process: psutil.Process) -> int:
    """Return the bytes that a process and its descendants hold, pages that they share counted once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
            continue
    return total


def watch(process: subprocess.Popen[bytes], limit: float) -> tuple[int, bool]:
    """Wait for a process, and return the most memory that it and its descendants held, and whether its time was up."""
    seen, largest, end = psutil.Process(process.pid), 0, time.monotonic() + limit
    while process.poll() is None:
        try:
            largest = max(largest, memory_of(seen))
        except psutil.NoSuchProcess:
            break
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return largest, True
        time.sleep(SAMPLED_EVERY)
    process.wait()
    return largest, False


def run_flow(flow: Flow, work: Path, limit: float = LIMIT) -> Outcome:
    """Run a flow, and return how it ended.

    Args:
        flow: The flow.
        work: Folder for its output.
        limit: Seconds after which it is ended.
    """
    work.mkdir(parents=True, exist_ok=True)
    if flow.script is not None:
        (work / f"{flow.name}.py").write_text(flow.script.text(WORK / flow.name), encoding="utf-8")
    log = work / f"{flow.name}.txt"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Lines of a table are not broken at 200 columns, and no other program on this machine meets at the flow's port.
    given = {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "PYTHONUNBUFFERED": "1", **rendezvous()}
    environment = {**os.environ, **given}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(flow.command), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        largest, too_long = watch(process, limit)
    minutes = (time.monotonic() - began) / 60
    printed = log.read_text(encoding="utf-8", errors="replace")
    said, missing = look_for(flow.prints, printed)
    why = ""
    if too_long:
        why = f"It was ended after {limit / 60:.0f} minutes."
    elif process.returncode not in flow.statuses:
        why = f"It ended with status {process.returncode}; expected: {', '.join(map(str, flow.statuses))}."
    elif missing:
        why = f"It did not print {' and '.join(missing)}."
    here = measured_on()
    return Outcome(
        name=flow.name,
        title=flow.title,
        command=_typed(flow),
        status="timed out" if too_long else "failed" if why else "passed",
        minutes=round(minutes, 1),
        peak_gb=round(largest / 1e9, 1),
        said=said,
        why=f"{why}\n{printed[-2000:]}" if why else "",
        date=here["date"],
        commit=here["commit"],
    )


def look_for(patterns: Sequence[str], printed: str) -> tuple[list[str], list[str]]:
    """Return what the first match of each pattern says, and the patterns without a match."""
    said, missing = [], []
    for pattern in patterns:
        found = re.search(pattern, printed)
        if found is None:
            missing.append(pattern)
        else:
            said.append(" ".join(found[0].split()))
    return said, missing


def read_outcomes(file: Path) -> dict[str, Outcome]:
    """Return the last outcome of each flow that a file of lines has."""
    if not file.is_file():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    outcomes = [Outcome(**json.loads(line)) for line in lines if line.strip()]
    return {outcome.name: outcome for outcome in outcomes}


def run_flows(flows: Sequence[Flow], work: Path, console: Console, limit: float = LIMIT) -> dict[str, Outcome]:
    """Run flows one after the other, and write a line about each as it ends.

    Args:
        flows: The flows.
        work: Folder of `flows.jsonl` and of each flow's output.
        console: Where progress is shown.
        limit: Seconds after which a flow is ended.

    Returns:
        The last outcome of each flow in the file, those of earlier calls included.
    """
    work.mkdir(parents=True, exist_ok=True)
    file = work / "flows.jsonl"
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(flows))
        for flow in flows:
            progress.update(task, description=flow.name)
            outcome = run_flow(flow, work, limit)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(outcome), ensure_ascii=False) + "\n")
            progress.print(
                f"{outcome.name}: {outcome.status}, {outcome.minutes} min, {outcome.peak_gb} GB", highlight=False
            )
            for line in outcome.said or outcome.why.splitlines()[:1]:
                progress.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
            progress.advance(task)
    return read_outcomes(file)


def prepare(flows: Sequence[Flow]) -> None:
    """Write the checkpoints and the data set that some flows read, unless they are there."""
    words = " ".join(" ".join(flow.command) for flow in flows)
    smollm2.unpack()
    if MIXTURE in words:
        smollm2.upcycle()
    if FOUR_LAYERS in words:
        smollm2.unpack(layers=4)
    if str(QUESTIONS) in words:
        (ROOT / QUESTIONS).mkdir(parents=True, exist_ok=True)
        chat.problems(32, seed=0).to_json(ROOT / QUESTIONS / "train.jsonl")


def record(outcomes: Mapping[str, Outcome], file: Path) -> None:
    """Write the outcomes of all flows, in their order, with machine and versions."""
    rows = [asdict(outcomes.get(flow.name) or not_run(flow)) for flow in FLOWS]
    document = {"command": "python -m examples.real_flows", **measured_on(), "figures": rows}
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Run the flows that are asked for, or those that have not passed yet; the exit status is 1 if one does not pass."""
    assert __doc__ is not None
    names = [flow.name for flow in FLOWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"flows to run: {', '.join(names)}")
    parser.add_argument("--again", action="store_true", help="run those that passed, too")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the last outcome of each flow to this file")
    arguments = parser.parse_args()
    work = ROOT / WORK
    known = read_outcomes(work / "flows.jsonl")
    passed = {name for name, outcome in known.items() if outcome.status == "passed"}
    if arguments.only is not None:
        flows = [flow for flow in FLOWS if flow.name in arguments.only]
    elif arguments.again:
        flows = list(FLOWS)
    else:
        flows = [flow for flow in FLOWS if flow.name not in passed]
    try:
        prepare(flows)
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        sys.exit(str(error))
    outcomes = run_flows(flows, work, Console())
    if arguments.record is not None:
        record(outcomes, arguments.record)
    broken = [name for name, outcome in outcomes.items() if outcome.status != "passed"]
    if broken:
        sys.exit(f"These flows did not pass: {', '.join(broken)}. Their output is in {WORK}.")


if __name__ == "__main__":
    main()
