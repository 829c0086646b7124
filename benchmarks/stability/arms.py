"""What is compared: one way to train an arm.

Every run starts from the same kind of model and stops when its responses are short. One update is taken from each rollout, so
that every token that a clip stops is stopped by the mismatch, and none by a change of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.stability.miniature import Grid

Objective = Literal["clip", "ratio", "decoupled", "plain", "sequence clip"]
FLOAT32, BF16, FP16 = Grid(), Grid(dtype=torch.bfloat16), Grid(dtype=torch.float16)


def stored(bits: int) -> Grid:
    """Return an engine whose linear layers are integers of so many bits, computing in bf16."""
    return Grid(dtype=torch.bfloat16, bits=bits)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Args:
        said: What it is, for the table.
        group: Section of the table.
        seeds: How many seeds are run.
        engine, trainer: What the sides compute in; float32 masters always lie beneath.
        on: Bits of the grid that the checkpoint is rounded to before training, as one that was published so; 0 for none.
        dithered: Whether the masters are then spread inside their cells, which leaves the engine's weights as they are.
        objective: "clip": PPO's clip on pi_trainer / pi_engine. "ratio": that ratio, not clipped. "decoupled": old
            log-probabilities computed again by the trainer, with the weights of `preset`. "plain": the same with no weights.
            "sequence clip": GSPO's clip of a response's mean ratio.
        preset: Of `mismatch.correction`.
        clip: Lower and upper distance of the clip from 1.
        rate: Of Adam.
        period: Updates after which learning-rate control halves the rate; 0 for no control.
        kl: Of a KL to the first policy: "k3 in the loss", "surrogate" (whose gradient is the KL's own), or "".
        vocabulary: Of the base model.
    """

    said: str
    group: str
    seeds: int = 3
    engine: Grid = FLOAT32
    trainer: Grid = FLOAT32
    on: int = 0
    dithered: bool = False
    objective: Objective = "clip"
    preset: str = ""
    clip: tuple[float, float] = (0.2, 0.2)
    rate: float = 1e-3
    period: int = 0
    kl: str = ""
    vocabulary: int = 512


INT4 = stored(4)
GSPO = (3e-4, 4e-4)
CAUSE, REMEDY, DOSE, FP, ROUTES, KL = (
    "What does it", "Corrections and other remedies", "Dose", "Precision (GSPO's clip, 3e-4 and 4e-4)",
    "Routes of experts", "KL to the first policy",
)  # fmt: skip


def _grid(said: str, group: str, **given: object) -> Arm:
    """Return an arm with a checkpoint on the int4 engine's grid."""
    return Arm(said=said, group=group, **({"engine": INT4, "on": 4} | given))  # type: ignore[arg-type]


def _dose(bits: int, group: str = DOSE) -> dict[str, Arm]:
    engine = stored(bits)
    said = f"int{bits} engine, checkpoint on its grid"
    return {
        f"int{bits}": Arm(said=said, group=group, engine=engine, on=bits),
        f"int{bits} matched": Arm(said=f"{said}; control", group=group, engine=engine, trainer=engine, on=bits),
    }


def _rate(name: str, rate: float) -> dict[str, Arm]:
    return {
        f"lr {name}": _grid(f"bypass, learning rate {name}", DOSE, rate=rate),
        f"lr {name} matched": _grid(f"bypass, learning rate {name}; control", DOSE, rate=rate, trainer=INT4),
    }


def _gspo(said: str, engine: Grid, trainer: Grid = FLOAT32) -> Arm:
    return Arm(said=said, group=FP, engine=engine, trainer=trainer, objective="sequence clip", clip=GSPO)


def _decoupled(said: str, preset: str, seeds: int = 3) -> Arm:
    return _grid(said, REMEDY, objective="decoupled", preset=preset, seeds=seeds)


def _kl(said: str, kl: str, **given: object) -> Arm:
    return Arm(said=said, group=KL, kl=kl, objective="decoupled", preset="decoupled_token_is", **given)  # type: ignore[arg-type]


K3, SURROGATE = "k3 in the loss", "surrogate"
ARMS: dict[str, Arm] = {
    "no mismatch": Arm(said="float32 on both sides: control", group=CAUSE, seeds=5),
    "bf16 engine": Arm(said="float32 trainer, bf16 engine", group=CAUSE, engine=BF16),
    "bypass": _grid("int4 engine, checkpoint on its grid, clip on π_trainer/π_engine", CAUSE, seeds=5),
    "matched": _grid(
        "the same, the trainer computes with the engine's weights and dtype: control", CAUSE, trainer=INT4, seeds=5
    ),
    "no clip": _grid("as bypass, without the clip", CAUSE, objective="ratio"),
    "off the grid": Arm(said="as bypass, checkpoint never rounded: control", group=CAUSE, engine=INT4, seeds=5),
    "dithered": _grid("as bypass, masters spread inside their cells", REMEDY, dithered=True, seeds=5),
    "plain": _decoupled("old log-probabilities computed again, no weights", "disabled"),
    "tis": _decoupled("the same, `decoupled_token_is`", "decoupled_token_is", seeds=5),
    "icepop": _decoupled("the same, `decoupled_token_icepop`", "decoupled_token_icepop"),
    "seq_mis": _decoupled("the same, `seq_mis`", "seq_mis"),
    "lr control": _grid("as bypass, learning-rate control, half every 15 updates", REMEDY, period=15),
    "lr control matched": _grid("matched, learning-rate control: control", REMEDY, period=15, trainer=INT4),
    **_dose(5),
    **_dose(3),
    "clip 0.4": _grid("bypass, clip 0.4", DOSE, clip=(0.4, 0.4)),
    **_rate("5e-4", 5e-4),
    **_rate("2e-3", 2e-3),
    "second base": _grid("bypass, another base model, 2,048 tokens", DOSE, vocabulary=2048),
    "second base matched": _grid("the same, matched: control", DOSE, vocabulary=2048, trainer=INT4),
    "gspo float32, bf16": _gspo("float32 trainer, bf16 engine", BF16),
    "gspo bf16": _gspo("bf16 on both sides: control", BF16, BF16),
    "gspo float32, FP16": _gspo("float32 trainer, FP16 engine", FP16),
    "gspo FP16": _gspo("FP16 on both sides, LossScaler: uniform FP16", FP16, FP16),
    "kl k3": _kl("tis, k3 in the loss", K3, engine=INT4, on=4),
    "kl surrogate": _kl("tis, the surrogate of `mismatch.kl`", SURROGATE, engine=INT4, on=4),
    "kl k3, no mismatch": _kl("float32 on both sides, k3 in the loss: control", K3),
    "kl surrogate, no mismatch": _kl("float32 on both sides, the surrogate: control", SURROGATE),
}

CONTROLS = {
    "bf16 engine": "no mismatch",
    "bypass": "matched",
    "no clip": "matched",
    "off the grid": "no mismatch",
    "dithered": "no mismatch",
    "plain": "matched",
    "tis": "matched",
    "icepop": "matched",
    "seq_mis": "matched",
    "lr control": "lr control matched",
    "int5": "int5 matched",
    "int3": "int3 matched",
    "clip 0.4": "matched",
    "lr 5e-4": "lr 5e-4 matched",
    "lr 2e-3": "lr 2e-3 matched",
    "second base": "second base matched",
    "gspo float32, bf16": "gspo bf16",
    "gspo float32, FP16": "gspo FP16",
    "kl k3": "kl surrogate",
    "kl k3, no mismatch": "kl surrogate, no mismatch",
    "own routes": "one router",
    "R3": "one router",
}
"""What each arm is compared with, seed by seed."""


@dataclass(frozen=True, kw_only=True)
class ExpertArm:
    """One way to train a mixture of experts in float32, whose engine picks experts by a rounded router.

    Args:
        said: What it is, for the table.
        bits: Of the integers that the engine's routers are rounded to; 0 for none.
        replayed: Whether the trainer replays the engine's routes.
        seeds: How many seeds are run.
        group: Section of the table.
    """

    said: str
    bits: int = 2
    replayed: bool = False
    seeds: int = 3
    group: str = ROUTES


EXPERTS: dict[str, ExpertArm] = {
    "own routes": ExpertArm(said="engine picks experts by an int2 router, clip on π_trainer/π_engine"),
    "R3": ExpertArm(said="the same, the trainer replays the engine's routes", replayed=True),
    "one router": ExpertArm(said="the same router on both sides: control", bits=0),
}


@dataclass(frozen=True, kw_only=True)
class RealArm:
    """One way to train by TRL, with a vLLM whose weights are rounded to int4 at each update.

    Args:
        said: What it is, for the table.
        preset: Of `mismatch.correction`.
        on: Whether the checkpoint is rounded to the engine's grid.
        dithered: Whether its masters are spread inside their cells.
        matched: Whether the trainer computes with the engine's weights.
        seeds: How many seeds are run.
        group: Section of the table.
    """

    said: str
    preset: str = "bypass_ppo_clip"
    on: bool = True
    dithered: bool = False
    matched: bool = False
    seeds: int = 3
    group: str = "TRL's GRPO in float32 with vLLM in bf16"

    def published(self) -> Arm:
        """Return what is done to the checkpoint, as an arm of the miniature has it."""
        return Arm(said=self.said, group=self.group, on=4 if self.on else 0, dithered=self.dithered)


REAL: dict[str, RealArm] = {
    "TRL bypass": RealArm(said="weights rounded to int4 at each update, checkpoint on that grid, `bypass_ppo_clip`"),
    "TRL matched": RealArm(said="the same, the trainer computes with the rounded weights: control", matched=True),
    "TRL off the grid": RealArm(said="as TRL bypass, checkpoint never rounded: control", on=False),
    "TRL dithered": RealArm(said="as TRL bypass, masters spread inside their cells", dithered=True),
    "TRL tis": RealArm(said="as TRL bypass, `decoupled_token_is`", preset="decoupled_token_is"),
}
CONTROLS |= {name: "TRL matched" for name in REAL if name != "TRL matched"}
