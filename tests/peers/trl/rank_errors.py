"""Two ranks of TRL's adapter over gloo, of which one fails before each collective of ours.

No engine and no trainer is built: the adapter's own methods run on stand-ins, and a weight that is sharded is one whose name is
gathered before it is sent.
"""

from __future__ import annotations

import datetime
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState
from mismatch_ext.adapters.trl import MismatchGRPOTrainer, engines, generation, objective
from mismatch_ext.adapters.trl.attach import Noted
from mismatch_ext.adapters.trl.centering import Centering
from mismatch_ext.adapters.trl.correction import CorrectionTerm
from mismatch_ext.adapters.trl.kl import BASELINE
from mismatch_ext.adapters.trl.objective import Objective
from mismatch_ext.adapters.trl.passes import RolloutPass
from mismatch_ext.adapters.trl.run import TrlRun
from mismatch_ext.adapters.trl.scoring import Scoring
from torch import Tensor
from trl import GRPOTrainer

from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError, RecordError, WeightSyncError
from mismatch_ext.kl import KlTerm
from mismatch_ext.presets import resolve
from mismatch_ext.ranks import WORLD, gathered
from mismatch_ext.rollout import Provenance, SamplingSettings
from tests.peers.forks import on_ranks

STEP = 3


def fail(error: Exception) -> Callable[..., Any]:
    """Return a function that raises an error."""

    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


LOG = SimpleNamespace(
    sums=SimpleNamespace(add_gap=lambda *_, **__: None, add_cached=lambda *_, **__: None), refusing=lambda *_: nullcontext(),
    holding=lambda *_: nullcontext(), count_bad_rows=lambda *_: None,
)  # fmt: skip


class Verifier:
    """Stands in for the check of weight updates; the trainer's digest is that of all ranks."""

    probes = torch.zeros(1, 2, dtype=torch.long)
    moves = begun = False

    def moved(self) -> bool:
        return self.moves

    def verify(self, samples: Any, look: Any, *, stepped: bool) -> None:
        """Accept what was sent."""


def checked(kind: type[generation.CheckedGeneration] = generation.CheckedGeneration, **changes: Any) -> Any:
    """Return the wrapper around TRL's, with weights of which each rank has a part."""

    def parameters() -> Iterator[tuple[str, Tensor]]:
        for name in ("first", "second", "third"):
            gathered(name)
            yield name, torch.zeros(1)

    def update(plain: Any, weights: Any) -> None:
        for _ in weights():
            pass

    trainer = SimpleNamespace(
        score=lambda probes: gathered("score"), fingerprint=lambda: "".join(gathered("digest")), step=STEP, ranks=WORLD,
        sent=lambda dtypes: None, log=LOG, split="train", trainer_settings=dict,
        trainer=SimpleNamespace(model=torch.nn.Identity(), accelerator=SimpleNamespace(unwrap_model=lambda model: model)),
    )  # fmt: skip
    engine = SimpleNamespace(update=update, captured=lambda _: nullcontext([]), fresh=False)
    found = object.__new__(kind)
    vars(found).update(
        _inner=SimpleNamespace(), plain_generate=lambda *_, **__: ([], [], [], None), checks=Checks(True), layout=None,
        engine=engine, masks=None, heads=None, base=None, verifies=True, verifier=Verifier(), weight_version=0, run=trainer,
        _kept=None, _refused=None, _sent_at=STEP, _plain_sync=lambda: None, _plain_parameters=parameters,
        reading=SimpleNamespace(version="0"), provenance=lambda: None, _sending=SimpleNamespace(dtypes=(), samples={}),
    )  # fmt: skip
    vars(found).update(changes)
    return found


def batch() -> dict[str, Any]:
    """Return a batch of two rows, both ranks' to the same prompt."""
    rank = WORLD.rank
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]]) + 10 * rank
    return {
        "prompt_ids": torch.tensor([[7, 8]] * 2), "prompt_mask": torch.ones(2, 2, dtype=torch.long), "completion_ids": ids,
        "completion_mask": torch.ones(2, 3, dtype=torch.long), "advantages": torch.tensor([1.0, -1.0]),
        "old_per_token_logps": torch.full((2, 3), -1.0 - rank), "ref_per_token_logps": torch.full((2, 3), -1.5),
        "sampling_per_token_logps": torch.full((2, 3), -1.0 - rank),
    }  # fmt: skip


def trainer(output: dict[str, Any], wrapper: Any, **sections: Any) -> Any:
    """Return a trainer with a block, for which TRL has made a batch."""
    block = MismatchConfig.parse(sections)
    assert block is not None
    found: Any = object.__new__(MismatchGRPOTrainer)
    correction = None if block.correction is None else CorrectionTerm(resolve(block.correction), WORLD)
    vars(found).update(
        use_vllm=True, vllm_generation=None, beta=0.1, tools=None, loss_type="dapo", rollout_func=None,
        max_completion_length=3,
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)}, state=SimpleNamespace(global_step=STEP),
        epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token", _tokenizer=SimpleNamespace(pad_token_id=0),
    )  # fmt: skip
    found.mm = found._acting = mm = object.__new__(TrlRun)
    vars(mm).update(
        trainer=found, checked=wrapper, block=block,
        kl=None if block.kl is None else KlTerm(block.kl, 0.1), checks=Checks(True),
        ranks=WORLD, correction=correction, lr=None, log=SimpleNamespace(**vars(LOG)),
        eval_split="eval/default", follow_sampling=lambda: None, check_records=lambda *_: [],
        held_scale=SimpleNamespace(hold=lambda held: None),
    )  # fmt: skip
    mm.scoring, mm.objective, mm.centering = Scoring(mm), Objective(mm), Centering(mm, block)
    mm.scoring.settle = lambda *_: None  # nothing is scored
    return found


@contextmanager
def made(output: dict[str, Any]) -> Iterator[None]:
    """Let TRL return a batch that has been made."""
    with mock.patch.object(GRPOTrainer, "_generate_and_score_completions", lambda *_: output):
        yield


def step(output: dict[str, Any], change: Callable[[Any], None] | None = None, **sections: Any) -> dict[str, Any]:
    """Take a batch through the adapter, after a change to the trainer."""
    found = trainer(output, checked(), **sections)
    if change is not None:
        change(found)
    rows = list(zip(output["prompt_ids"].tolist(), output["completion_ids"].tolist(), strict=True))

    def generated(_: Any) -> dict[str, Any]:
        found.mm.rollouts.generated += rows
        return output

    with made(output):
        return found.mm.make_batch(generated, rows)  # type: ignore[no-any-return]


def unequal_turns(fails: bool) -> str:
    """Generate more often on one rank, and not at all in a batch."""
    found = checked()
    found.verifier.moved = lambda: gathered("moved") == ["moved"] * 2
    found.verifier.moves = True
    for turns in ([3, 2], [1, 0]):
        with found.keeping([]):
            for _ in range(turns[WORLD.rank]):
                found.generate([])
            found.agree()
    return f"sent {found.weight_version} times"


def sampled_alone(fails: bool) -> str:
    """Sample on one rank alone between two batches, of an engine that is awake and of one that sleeps; weights are whole."""
    found = checked(_sent_at=STEP - 1, _plain_parameters=lambda: iter([("first", torch.zeros(1))]))
    found.run.score, found.run.fingerprint, found.verifier.moves = lambda probes: probes, lambda: "digest", True
    sent = []
    for asleep in (False, True):
        found._inner._llm_weights_sleeping = asleep
        if WORLD.rank == 0:
            found.generate([])
        with found.keeping([]):
            sent.append(sum(gathered(found.weight_version)))
    return f"sent {sent}"


def moved_on_one(fails: bool) -> str:
    """Change the weights of one rank alone."""
    found = checked()
    found.verifier.moves = fails
    with found.keeping([]):
        pass
    return f"sent {found.weight_version} times"


def broken_update(fails: bool) -> None:
    """Fail in the midst of the weights."""

    def update(plain: Any, weights: Any) -> None:
        for name, _ in weights():
            if fails and name == "second":
                raise OSError("load_weights failed")

    found = checked()
    found.engine.update = update
    found.sync_weights()


def stale_update(fails: bool) -> None:
    """Fail where both sides are checked after an update."""
    found = checked()
    if fails:
        found.verifier.verify = fail(WeightSyncError("the engine is stale"))
    found.sync_weights()


def _origin() -> Provenance:
    return Provenance(
        engine="vllm", engine_version="0", dtype="float32", kv_cache_dtype=None, weight_version=0, patch_digest="none",
        sampling=SamplingSettings(), logprobs_mode="processed_logprobs",
    )  # fmt: skip


def refused_rollout(fails: bool) -> None:
    """Get more log-probabilities than tokens from the engine of one rank, in the second of its turns."""
    rows = [([[1]], [[2]], [[[-1.0]] * (2 if fails and turn else 1)], None) for turn in range(2)]
    found = checked(plain_generate=lambda *_, **__: rows.pop(0))

    def generate(*_: Any) -> Any:
        for _ in range(2):
            found.generate([[1]])
        gathered("lengths")  # as TRL gathers them
        return [[1]], [[2]], None, None, None

    own = trainer(batch(), found)
    own.mm.scoring.batch = RolloutPass()
    found.provenance = _origin
    with mock.patch.object(GRPOTrainer, "_generate", generate), found.keeping([]):
        own._generate([])


def measured(case: Callable[[Any], Any], **changes: Any) -> str:
    """Go on after a failed check, with as many collectives on both ranks; return how many failed on any rank."""
    checks = Checks(False)
    found = checked(Noted, checks=checks, **changes)
    with found.keeping([]):
        case(found)
        found.agree()
    assert gathered("after") == ["after"] * 2
    return f"verifies {found.verifies}, {max(gathered(sum(checks.counts.values())))} failed"


def measured_score(fails: bool, error: Exception) -> str:
    """Fail on one rank in scoring the probes."""

    def case(found: Any) -> None:
        found.run.score = fail(error) if fails else lambda probes: 1
        found._sync(WORLD)

    return measured(case)


def served_update(fails: bool) -> None:
    """Fail on the main process in sending to a server, before the first weight."""
    found = checked()
    server = object.__new__(engines.Served)
    vars(server).update(_ranks=WORLD, _client=None, remote=None, fresh=False)

    def plain() -> None:
        weights = found._sent_parameters()
        if fails:
            raise OSError("the server is gone")
        for _ in weights:
            pass

    found.engine, found._plain_sync = server, plain
    found.sync_weights()


def served_routes(fails: bool) -> str:
    """Get the main process's answers of a server, of which each rank is to get its own two and no other."""
    server = object.__new__(engines.Served)
    choices = [{"index": number, "token_ids": [number]} for number in range(4)]
    vars(server).update(_ranks=WORLD, _client=SimpleNamespace(choices=choices if fails else None))
    server._expect_own_weights = lambda: None
    to_all = mock.patch.object(engines, "broadcast_object_list", fail(AssertionError("all routes were sent to all")))
    with mock.patch.object(engines, "unpacked", lambda routes: routes), to_all, server.captured(None) as outputs:
        pass
    return f"got {[output.outputs[0].token_ids[0] for output in outputs]}"


def other_sampling(fails: bool) -> Any:
    """Fail in comparing what both sides sample with."""

    def change(own: Any) -> None:
        own.mm.scoring.routing = None
        own.mm.follow_sampling = fail(RecordError("another temperature")) if fails else lambda: None

    return step(batch(), change)


def refused_gap(fails: bool) -> Any:
    """Fail in measuring the gap of a batch."""

    def change(own: Any) -> None:
        if fails:
            own.mm.log.sums = SimpleNamespace(add_gap=fail(RecordError("not finite")))

    return step(batch(), change)


def controller(fails: bool) -> None:
    """Fail in measuring the KL that moves the coefficient."""
    sums = fail(RecordError("no KL")) if fails else objective.kl_sums
    with mock.patch.object(objective, "kl_sums", sums):
        step(batch(), kl={"coef": 0.1, "target_kl": 0.01, "baseline": "none"})


def baseline(fails: bool) -> str:
    """Take a batch whose only group is on both ranks, and return a row's baseline, and how often objects were sent."""
    with mock.patch.object(type(WORLD), "gather", autospec=True, side_effect=type(WORLD).gather) as gather:
        found: Tensor = step(batch(), kl={"coef": 0.1})[BASELINE]
    return f"baseline {[round(value, 3) for value in found[0].tolist()]} by {gather.call_count} object"


CASES: dict[str, Callable[[bool], Any]] = {
    "turns": unequal_turns,
    "alone": sampled_alone,
    "moved": moved_on_one,
    "update": broken_update,
    "stale": stale_update,
    "rollouts": refused_rollout,
    "measured score": lambda fails: measured_score(fails, EngineError("out of memory")),
    "mistaken score": lambda fails: measured_score(fails, AttributeError("a mistake of ours")),
    "served update": served_update,
    "served routes": served_routes,
    "sampling": other_sampling,
    "gap": refused_gap,
    "baseline": baseline,
    "controller": controller,
}


def on_two(names: list[str]) -> list[dict[str, str]]:
    """Return what each of two ranks raised in each case."""
    return on_ranks(raised, 2, names=names)


def raised(names: list[str]) -> dict[str, str]:
    """Let each case fail on one rank, and return what this one raised."""
    warnings.simplefilter("ignore")
    PartialState(cpu=True, backend="gloo", timeout=datetime.timedelta(seconds=30))
    found = {}
    for name in names:
        failing = 0 if name.startswith("served") else 1  # the main process asks servers
        try:
            said = CASES[name](WORLD.rank == failing)
            said = said if isinstance(said, str) else "nothing"
        except Exception as error:  # noqa: BLE001  # that is what is looked at
            said = f"{type(error).__name__}: {error}"
        found[name] = " ".join(said.split())
    return found
