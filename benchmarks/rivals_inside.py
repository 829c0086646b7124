"""What runs in the environment of a rival: `python -m benchmarks.rivals_inside record|live ASKED ANSWER`, two files of JSON."""

from __future__ import annotations

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BEFORE, STEPS, BATCH = 4, 8, 48
Said = list[list[str]]  # name and sentence of each thing that a tool says
Settings = dict[str, Any]
Attached = tuple[Any, Callable[[], dict[str, Said]]]  # a trainer, and what its tools say after training
Row = Sequence[Any]  # prompt, response, log-probabilities of the engine and of the trainer, weight version


def record(asked: dict[str, Any]) -> list[list[str]]:
    """Write martingale's record of a log, as its README says, and return the alarms of its monitor after three clean steps."""
    from martingale.integrations.verl import MartingaleMonitor
    from martingale.record import Recorder, SamplerConfig

    sampler = SamplerConfig(**asked["sampler"])

    def recorded(recorder: Any, rows: Sequence[Row], step: int) -> None:
        """Record rows that the weights of this step or of earlier ones sampled, and the trainer's scores at this step."""
        latest = max(row[4] for row in rows)
        steps = sorted({step + row[4] - latest for row in rows})
        weights = {at: hashlib.blake2b(str(at).encode(), digest_size=32).hexdigest() for at in steps}
        revisions = {at: recorder.publish_revision(weights[at], b"tokenizer", sampler, step=at) for at in steps}
        for number, (prompt, response, engine, trainer, version) in enumerate(rows):
            with recorder.sequence(0, f"{step}-{number}", prompt) as sequence:
                for token, logprob in zip(response, engine, strict=True):
                    sequence.token(revisions[step + version - latest].digest, token, logprob)
            recorder.score(sequence.record.digest, revisions[step].digest, trainer)

    recorded(Recorder(asked["doctor"]), asked["rows"], 3)
    flight = SimpleNamespace(recorder=Recorder(asked["alarms"]), stats={})
    monitor = MartingaleMonitor(flight, halt_on_error=False)
    third = len(asked["clean"]) // 3
    for step in range(3):
        recorded(flight.recorder, asked["clean"][step * third : (step + 1) * third], step)
        monitor.on_step_end(step)
    recorded(flight.recorder, asked["rows"], 6)
    monitor.on_step_end(6)
    return [[alarm.kind, alarm.message] for alarm in monitor.alarms]


def keeps_weights(trainer: Any) -> None:
    """Let the engine keep its weights from a step on."""
    from mismatch_ext.adapters.vllm.engine import runner

    engine = runner(trainer.vllm_generation.llm)
    reload = engine.reload_weights

    def reloaded(weights_iterator: Iterator[Any], **how: Any) -> None:
        # TRL goes on sending.
        sent = list(weights_iterator)
        if trainer.state.global_step < BEFORE:
            reload(weights_iterator=iter(sent), **how)

    engine.reload_weights = reloaded


def live(asked: dict[str, Any]) -> dict[str, Any]:
    """Train once for each fault, with our block or with both rivals attached, and return what each tool says."""
    from datasets import Dataset

    from examples.arithmetic.shipped import FOLDER
    from examples.arithmetic.task import make_dataset, reward
    from mismatch_ext.errors import ConfigError, WeightSyncError
    from tests.peers.trl.scenarios_measuring import cpu
    from tests.peers.trl.scenarios_training import arguments

    answers = {}
    for name, fault in asked["faults"].items():
        plants = dict(fault)
        kept = plants.pop("keeps_weights", False)
        settings = {"bf16": True, "max_completion_length": 80, "vllm_max_model_length": 128, "learning_rate": 1e-5}
        settings |= {"max_steps": STEPS, "num_generations": 4, "per_device_train_batch_size": BATCH}
        rows = Dataset.from_list(make_dataset(BATCH // 4 * STEPS, seed=5000))
        given = {"model": str(FOLDER / "dense"), "reward_funcs": reward, "train_dataset": rows}
        ours, out = asked["tool"] == "mismatch-ext", f"{asked['out']}/{name}"
        with nullcontext() if ours else cpu(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trainer, said = (with_ours if ours else with_rivals)(out, arguments(out, **settings | plants), given)
                if kept:
                    keeps_weights(trainer)
                trainer.train()
            except (ConfigError, WeightSyncError) as error:
                answers[name] = {asked["tool"]: [[type(error).__name__, str(error)]]}
            else:
                answers[name] = said()
    return answers


def with_ours(out: str, arguments: Settings, given: Settings) -> Attached:
    from mismatch_ext.adapters import cli
    from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer

    # An alarm that is raised at once, so that the first batch is kept: the model that is trained has scored it.
    always = "mismatch/tokens"
    block = {"monitor": {"alarms": {always: {"above": 0.0, "patience": 1}}}}
    trainer = MismatchGRPOTrainer(args=MismatchGRPOConfig(**arguments, mismatch=block), **given)

    def said() -> dict[str, Said]:
        run = Path(out, "mismatch")
        lines = [json.loads(line) for line in (run / "metrics-000.jsonl").read_text("utf-8").splitlines()]
        told = [line for line in lines if line["kind"] == "event" and line["level"] != "info"]
        told = [line for line in told if line["data"].get("metric") != always]
        kept, answer = run / "evidence-1.jsonl.gz", run / "doctor_step_1"
        cli.main(["doctor", "--rollouts", str(kept), "--model", given["model"], "--quick", "--out", str(answer)])
        found = [json.loads(path.read_text("utf-8")) for path in sorted(run.glob("doctor_step_*/doctor.json"))]
        causes = [[cause["key"], cause["said"]] for one in found for cause in one["causes"]]
        notes = [["cut" if "are cut at" in note else "note", note] for one in found for note in one["notes"]]
        return {"mismatch-ext": [*([line["name"], line["message"]] for line in told), *causes, *notes]}

    return trainer, said


def with_rivals(out: str, arguments: Settings, given: Settings) -> Attached:
    from martingale.integrations.trl import MartingaleGRPOTrainer, MartingaleRecorder
    from rl_doctor.integrations.trl import RLDoctorCallback
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    flight = MartingaleRecorder(f"{out}/record", tokenizer=AutoTokenizer.from_pretrained(given["model"]))
    # Its defaults wait for 60 steps.
    callback = RLDoctorCallback(check_every=4, min_steps=8)
    trainer = MartingaleGRPOTrainer(
        args=GRPOConfig(**arguments), flight_recorder=flight, halt_on_error=False, callbacks=[callback], **given
    )

    def said() -> dict[str, Said]:
        callback.monitor.check()
        alarms = [[alarm.kind, alarm.message] for alarm in trainer.martingale_monitor.alarms]
        problems = [found for found in callback.monitor.latest.problems if found.severity.label in ("WARN", "CRIT")]
        return {"martingale": alarms, "rldoctor": [[found.detector, found.summary] for found in problems]}

    return trainer, said


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    asked = json.loads(Path(sys.argv[2]).read_text("utf-8"))
    answer = {"record": record, "live": live}[sys.argv[1]](asked)
    Path(sys.argv[3]).write_text(json.dumps(answer), encoding="utf-8")
