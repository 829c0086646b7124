"""Sample with the engine, score with the trainer, name why they differ, and try the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from mismatch_ext.adapters.doctor.asking import ToSample, sequences
from mismatch_ext.adapters.doctor.blocks import add_blocks, hidden_states
from mismatch_ext.adapters.doctor.configs import differences, engines_own
from mismatch_ext.adapters.doctor.engine_rungs import engine_rungs
from mismatch_ext.adapters.doctor.hosts import RESPONSES
from mismatch_ext.adapters.doctor.progress import QUICK, WHOLE, Progress, of_log
from mismatch_ext.adapters.doctor.server.engine import ServedEngine
from mismatch_ext.adapters.doctor.sides import DoctorsEngine, ReadBack, Run, in_live_dtype
from mismatch_ext.adapters.placeholders import placeholders_of

from mismatch_ext.doctor.diagnose import OPEN, SAMPLED
from mismatch_ext.doctor.evidence import LEAST_TOKENS
from mismatch_ext.doctor.logged_trainer import compare_logged
from mismatch_ext.errors import ConfigError, MismatchError, RecordError

if TYPE_CHECKING:
    from mismatch_ext.adapters.transformers.doctor.scorer import Scorer

    from mismatch_ext.doctor import Diagnosis, Evidence, Sample
    from mismatch_ext.doctor.evidence import Engine
    from mismatch_ext.doctor.logged import Logged
    from mismatch_ext.doctor.sample import Floats

# Engine settings that a remedy removes, by the family of the cause, under vLLM's and SGLang's names.
MENDED = {
    "cache": ("kv_cache_dtype",),
    "config": ("hf_overrides", "json_model_override_args"),
    "weights": ("quantization", "hf_overrides", "torchao_config", "json_model_override_args"),
}
# Responses that are sampled to the run's whole length.
FAR_ROWS = 4
# A quick look samples so many responses of a large vocabulary, with so many elements of logits: 2,730 tokens of 49,152. Shares
# need `LEAST_TOKENS`, and some responses end early.
QUICK_ROWS, QUICK_LOGITS, LEAST_QUICK = 32, 2**27, LEAST_TOKENS * 5 // 4
# Responses of which the first line speaks.
LOOKED_AT = 8
# Fields of the engine's configuration whose values are tried in the trainer's model.
WINDOW, EXPERTS = "sliding_window", "num_experts_per_tok"


def examine(
    sides: Run,
    prompts: Sequence[Sequence[int]],
    *,
    responses: int | None = None,
    max_tokens: int = 128,
    shortened: bool = False,
    longest: int = 0,
    far: bool = True,
    seed: int = 0,
    seen: Sequence[Sequence[int]] | None = None,
    quick: bool = False,
) -> Diagnosis:
    """Start a run's engine, sample with it, and say why the trainer differs.

    Args:
        sides: The run.
        prompts: Token ids of each prompt, as the trainer has them.
        responses: Number of responses to sample; only so many prompts are used, the first ones. None takes `RESPONSES`, or with
            `quick` as many as `size_quickly` says.
        max_tokens: Largest number of tokens of a response.
        shortened: Whether `quick` may cut responses, too.
        longest: The run's own limit, by which the verdict is bounded; 0 if unknown.
        far: Look at a few responses of the run's own limit, too, if it is larger.
        seed: Seed of the bootstrap intervals.
        seen: Token ids of each prompt as the engine gets them; None if these are the trainer's.
        quick: Leave out the causes that need a forward pass each.

    Raises:
        RecordError: A token id of a prompt or response is beyond the model's vocabulary.
    """
    from mismatch_ext.adapters.transformers.doctor.models import load_model, routing_shape
    from mismatch_ext.adapters.transformers.scoring import logits_width

    from mismatch_ext.doctor import conclude

    model = load_model(sides.model, config=sides.trainer_config)
    if responses is None:
        responses = RESPONSES
        if quick:
            responses, max_tokens = size_quickly(logits_width(model), max_tokens, shortened=shortened)
    prompts, seen = prompts[:responses], None if seen is None else seen[:responses]
    _ensure_known("--prompts", sides.model, model, prompts)
    # If the engine uses another number of experts per token, its routes cannot be replayed.
    shape = None if engines_own(sides, EXPERTS) else routing_shape(model)
    asked = ToSample(prompts=prompts, responses=responses, max_tokens=max_tokens, sampling=sides.sampling, seen=seen)
    with Progress("doctor", QUICK if quick else WHOLE) as rung:
        rung("engine")
        engine = sides.start(shape, _lengths(asked, longest if far else 0))
        notes: tuple[str, ...] = ()
        if isinstance(engine, ReadBack):
            sides, notes = in_live_dtype(sides, engine.reading.model_dtype)
        try:
            sample = engine.sample(asked)
            rung("first look")
            rung.say(_first_look(sides, model, sample))
            rung("engine again")
            again = engine.score(sample)
            rung("engine's own noise")
            rungs = engine_rungs(
                engine, sides, sample, again, prompts, max_tokens=max_tokens, same=seen is None, quick=quick
            )
            states = hidden_states(engine, sample)
            long = _far(engine, asked, longest if far else 0)
        finally:
            engine.shutdown()
        _ensure_known("--engine-model" if sides.server is None else "--server", sides.model, model, sample.responses)
        evidence, scorer = _gathered(sides, model, sample, rung, engine=rungs, seed=seed, quick=quick)
        evidence.notes += notes
        evidence.longest = longest
        evidence.configs = differences(sides)
        _ask_again(evidence, engine, sides, again, scorer, rung)
        rung("blocks")
        add_blocks(evidence, states, scorer)
        _look_farther(evidence, long, scorer, longest)
        evidence.seconds = rung.ended()
        return conclude(evidence)


def _ask_again(
    evidence: Evidence, engine: DoctorsEngine, sides: Run, again: Sample, scorer: Scorer, rung: Callable[[str], None]
) -> None:
    """Add what the engine says of itself and of the same tokens as a prompt, and what remedies do."""
    from mismatch_ext.doctor import conclude, rescored
    from mismatch_ext.doctor.evidence import distance

    if isinstance(engine, ReadBack):
        evidence.engine_head = engine.reading.head_dtype
    if isinstance(engine, ServedEngine):
        evidence.notes += engine.notes(sides.model, evidence.sample)
        if conclude(evidence).verdict in OPEN:
            evidence.distance = distance(again, scorer.rescored(again))
    try:
        _try_remedies(evidence, sides, again, scorer, rung)
    except MismatchError as error:
        # What is known is valid without the remedy.
        evidence.notes.append(f"the remedy could not be tried: {error}")
    if conclude(evidence).verdict in OPEN:
        evidence.prompt = rescored(again, scorer.rescored(again))


def _look_farther(evidence: Evidence, long: Sample | str, scorer: Scorer, longest: int) -> None:
    """Add the errors of responses of the run's whole length to a clean verdict, or why there are none."""
    from mismatch_ext.doctor import conclude
    from mismatch_ext.doctor.evidence import Later

    if isinstance(long, str):
        if long:
            evidence.notes.append(f"responses of up to {longest} tokens were not looked at: {long}")
    elif conclude(evidence).verdict == "clean":
        evidence.later = Later.of(long, scorer.rescored(long))


def examine_logged(sides: Run, logged: Logged, *, seed: int = 0, quick: bool = False) -> Diagnosis:
    """Say why the trainer differs from an engine that no longer runs, from rollouts that a host logged; no remedy can be tried.

    Of several weight versions the one nearest to the model is examined, and the gap of each is a note.

    Args:
        sides: The run; the engine's dtype is used, and no other setting of the engine.
        logged: The logged rollouts.
        seed: Seed of the bootstrap intervals.
        quick: Leave out the causes that need a forward pass each.

    Raises:
        ConfigError: The rollouts say that the engine computed in another dtype than the run's.
        RecordError: A token id is beyond the model's vocabulary, or the responses are not of one run.
        RoutingError: The routes do not fit the model.
    """
    from mismatch_ext.adapters.transformers.doctor.models import load_model, routing_shape
    from mismatch_ext.adapters.transformers.doctor.scorer import trainer_logprobs

    from mismatch_ext.doctor import conclude
    from mismatch_ext.doctor.logged import of_nearest

    dtype = logged.settings.get("dtype", sides.dtype)
    if dtype != sides.dtype:
        raise ConfigError(f"--dtype: {sides.dtype}, and {logged.path} was sampled in {dtype}; give --dtype {dtype}.")
    # Only the temperature is taken from the file; other sampling settings are unknown.
    known = {name: logged.settings[name] for name in ("temperature",) if name in logged.settings}
    sides = replace(sides, sampling=known)
    model = load_model(sides.model, config=sides.trainer_config)
    shape = routing_shape(model)
    config: Any = model.config
    logged = logged.of_text(placeholders_of(config.to_dict()))
    sample = logged.sample(shape)
    _ensure_known("--rollouts", sides.model, model, (*sample.prompts, *sample.responses))
    notes: tuple[str, ...] = ()
    with Progress("doctor", of_log(QUICK if quick else WHOLE)) as rung:
        if len(logged.versions) > 1:
            rung("weight versions")
            logged, notes = of_nearest(
                logged,
                sample,
                trainer_logprobs(
                    model,
                    sample,
                    dtype=sides.trainer_dtype,
                    temperature=sides.temperature,
                    attention=sides.attention,
                ),
            )
            sample = logged.sample(shape)
        own = logged.trainer(sample)
        # Of rows that a run has kept, it is known that these are its trainer's, and how that computed.
        computed = own if logged.kept is not None and own is not None and np.isfinite(own).all() else None
        evidence, scorer = _gathered(sides, model, sample, rung, seed=seed, quick=quick, computed=computed)
        evidence.notes += (logged.said(shape is not None), *notes)
        if computed is not None:
            _try_run_pass(evidence, logged, computed, scorer, rung, replays=sides.replays)
        elif own is not None:
            rung("log's trainer")
            evidence.logged = compare_logged(
                sample, scorer.scores, own, known.get("temperature"), scored_late=logged.scored_late
            )
        elif any(response.trainer_logprobs for response in logged.responses):
            copied = "trainer_logprobs are the engine's to the last bit, as a bypass mode copies them: not compared"
            evidence.notes.append(copied)
        evidence.seconds = rung.ended()
        return conclude(evidence)


def _try_run_pass(
    evidence: Evidence,
    logged: Logged,
    computed: Floats,
    scorer: Scorer,
    rung: Callable[[str], None],
    *,
    replays: bool,
) -> None:
    """Add what a run's own pass does otherwise than a plain one, if it differs beyond rounding."""
    from mismatch_ext.adapters.transformers.doctor.run_pass import try_run_pass

    from mismatch_ext.doctor import conclude

    if not any(cause.key == "layout" for cause in conclude(evidence).causes):
        return
    rung("run's own pass")
    width = max(response.kept.width for response in logged.responses if response.kept is not None)
    evidence.run_pass = try_run_pass(scorer, computed, replays=replays, prompt_width=width)
    found = conclude(evidence)
    if found.verdict == "partly" and any(cause.key == "layout" for cause in found.causes):
        step = logged.responses[0].step
        unlike = f"or --model is another checkpoint: these rows were scored by the weights after step {step}"
        evidence.notes.append(unlike)


def size_quickly(vocabulary: int | None, max_tokens: int, *, shortened: bool) -> tuple[int, int]:
    """Return the number of responses that a quick look samples, and their longest length, which is cut only if `shortened`.

    All of the doctor's costs grow with tokens, and its memory with tokens times vocabulary.
    """
    tokens = max(LEAST_QUICK, QUICK_LOGITS // (vocabulary or 2**17))
    if tokens >= RESPONSES * max_tokens:
        return RESPONSES, max_tokens
    if shortened:
        max_tokens = min(max_tokens, tokens // QUICK_ROWS)
    return min(RESPONSES, max(QUICK_ROWS, tokens // max_tokens)), max_tokens


def _first_look(sides: Run, model: Any, sample: Sample) -> str:
    """Return the gap of a few responses in a sentence, which takes one short pass."""
    from mismatch_ext.adapters.transformers.doctor.scorer import trainer_logprobs

    sampled = [row for row, mask in enumerate(sample.masks) if any(mask)]
    few = sample.part(sampled[:: -(-len(sampled) // LOOKED_AT)])
    gap = few.engine - trainer_logprobs(
        model, few, dtype=sides.trainer_dtype, temperature=sides.temperature, attention=sides.attention
    )
    at = int(np.abs(gap).argmax())
    return (
        f"first look, {len(gap)} tokens: mean |Δlogp| {np.abs(gap).mean():.1e} nats, largest {abs(gap[at]):.1e} at token "
        f"{few.place[at]} of a response; the engine computes in {sides.dtype}, the trainer in {sides.trainer_dtype}"
    )


def _ensure_known(option: str, path: str, model: Any, rows: Sequence[Sequence[int]]) -> None:
    from mismatch_ext.adapters.transformers.scoring import logits_width

    width = logits_width(model)
    largest = max(max(row) for row in rows)
    if width is not None and largest >= width:
        raise RecordError(
            f"{option}: token id {largest} is beyond the vocabulary of {path}, {width} tokens; give the model that was trained."
        )


def _gathered(
    sides: Run,
    model: Any,
    sample: Sample,
    rung: Callable[[str], None],
    *,
    engine: Engine | None = None,
    seed: int,
    quick: bool,
    computed: Floats | None = None,
) -> tuple[Evidence, Scorer]:
    from mismatch_ext.adapters.transformers.doctor.causes import of_model
    from mismatch_ext.adapters.transformers.doctor.changes import attends_by_torch
    from mismatch_ext.adapters.transformers.doctor.scorer import Scorer, mixes_packed
    from mismatch_ext.adapters.transformers.peft_adapters import base_of

    from mismatch_ext.doctor import gather

    rung("trainer")
    left_out = sides.layout == "packed" and mixes_packed(model)
    scorer = Scorer(
        model,
        sample,
        trainer_dtype=sides.trainer_dtype,
        engine_dtype=sides.dtype,
        temperature=sides.temperature,
        trainer_weights=sides.trainer_weights,
        replays=sides.replays,
        layout="right" if left_out else sides.layout,
        head=sides.head,
        attention=sides.attention,
        computed=computed,
    )
    own = {name: engines_own(sides, field) for name, field in (("windows", WINDOW), ("counts", EXPERTS))}
    causes = [] if quick else of_model(scorer, sides.older, base_of(sides.model), **own)
    asked = sides.sampling.get("temperature")
    evidence = gather(sample, scorer.scores, causes, engine=engine, asked=asked, seed=seed, progress=rung)
    if left_out:
        evidence.notes.append(
            "packed rows were not rebuilt: this model lets a sequence see the one before it, unless the host gives the boundaries"
        )
    if not quick and not attends_by_torch(model):
        untried = "another scale of attention, an fp8 KV cache"
        evidence.notes.append(f"not tried, because this model needs eager attention: {untried}")
    return evidence, scorer


def _lengths(asked: ToSample, longest: int) -> list[int]:
    """Return the lengths of the sequences that an engine holds at a time, in tokens: those of the sample, or of `_far`."""
    far = [len(prompt) + longest for prompt in asked.given[:FAR_ROWS]]
    return max(asked.lengths, far, key=sum)


def _far(engine: DoctorsEngine, asked: ToSample, longest: int) -> Sample | str:
    """Return a few responses of the run's whole length, scored as prompts; or why there are none, "" if none are needed."""
    if longest <= asked.max_tokens:
        return ""
    prompts, seen = asked.prompts[:FAR_ROWS], None if asked.seen is None else asked.seen[:FAR_ROWS]
    try:
        return engine.score(
            engine.sample(replace(asked, prompts=prompts, seen=seen, responses=FAR_ROWS, max_tokens=longest))
        )
    except MismatchError as error:
        return str(error)


def _try_remedies(evidence: Evidence, sides: Run, again: Sample, scorer: Scorer, rung: Callable[[str], None]) -> None:
    """Try the remedies of the named causes together, on the same tokens."""
    from mismatch_ext.doctor import Tried, conclude, rescored

    mendable = conclude(evidence).mendable
    families = {cause.family for cause in mendable if cause.family in (*SAMPLED, *MENDED)}
    by_a_start = families & set(MENDED)
    keys = ", ".join(cause.key for cause in mendable if cause.family in MENDED)
    if by_a_start and sides.server is not None:
        evidence.notes.append(
            f"to confirm {keys} takes a start of the engine without it, which a server is not given: it stays a fit; start it so "
            "and ask again, or give --engine in the place of --server"
        )
        return
    mended = sides.mended([key for family in by_a_start for key in MENDED[family]])
    if by_a_start and mended == sides:
        evidence.notes.append(
            f"{keys}: no start of the engine can confirm or refute it, because the engine already serves --model's own folder "
            "without a setting to take out. The weights or the code of one side cause it"
        )
        families -= by_a_start
        by_a_start = set()
    if not families:
        return
    rung("remedy")
    if by_a_start:
        sample = evidence.sample
        engine = mended.start(scorer.shape, [len(ids) for ids in sequences(sample)])
        try:
            again = engine.score(sample)
        finally:
            engine.shutdown()
    left, after = rescored(again, scorer.rescored(again))
    evidence.remedies.append(Tried(families=families, left=left, after=after))
