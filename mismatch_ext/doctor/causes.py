"""What a cause is, a row in `logits.py` or in the adapter of transformers, and what to change in each host (remedies.toml)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from mismatch_ext.doctor.sample import Floats

HOSTS = ("trl", "verl", "vllm", "sglang", "loop")
_ROLLOUT = "actor_rollout_ref.rollout."


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Lines to change; "" where there is nothing to change in a host."""

    trl: str = ""
    verl: str = ""
    vllm: str = ""
    sglang: str = ""
    loop: str = ""


_TABLES = tomllib.loads(Path(__file__).with_name("remedies.toml").read_text(encoding="utf-8"))
REMEDIES = {name: Remedy(**lines) for name, lines in _TABLES.items()}


def remedy(name: str, temperature: float = 1.0, *, engine_dtype: str = "", trainer_dtype: str = "") -> Remedy:
    """Return the remedy of a name for the trainer's temperature and both dtypes, "" if unknown; an empty one if there is none."""
    lines = asdict(REMEDIES.get(name, Remedy()))
    if name == "temperature":
        lines |= {"trl": f"temperature: {temperature:g}", "verl": f"{_ROLLOUT}temperature={temperature:g}"}
        lines |= {"loop": f"SamplingSettings(temperature={temperature:g})"}
    if name == "dtype":
        # Do not advise what is already set.
        lines |= {"vllm": "", "sglang": ""} if engine_dtype == "float16" else {}
        lines |= {"trl": "", "verl": ""} if trainer_dtype == "float16" else {}
        lines |= {"loop": ""} if engine_dtype == trainer_dtype == "float16" else {}
    return Remedy(**lines)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cause:
    """Something that an engine may do differently from the trainer."""

    key: str
    family: str  # of causes that resemble each other: sampling, reporting, config, weights, cache, prompt or experts
    said: str  # a sentence; `{x}` stands for the parameter
    # Maps a parameter to the log-probabilities `[N]` that the oracle would give with this cause; -inf for tokens that it makes
    # impossible.
    predict: Callable[[float], Floats]
    remedy: str = ""  # a key of `REMEDIES`; "" if that is the cause's own key
    needs: bool = True  # whether model and sample have what this cause changes; otherwise it is not tried
    grid: tuple[float, ...] = (1.0,)  # parameters to try; positive if they are refined
    # Steps of refinement between the neighbors on the grid; more are made while the tokens tell the parameters apart. 0 for
    # parameters that are counts or indices of a list.
    steps: int = 0
    neutral: float | None = None  # the parameter at which nothing changes
    names: tuple[str, ...] = ()  # if the parameter is an index, the texts that the sentence shows instead
    # Like `predict`, but only for some of the fitted responses, with NaN for all other tokens: chooses the parameter when a
    # prediction is expensive.
    screen: Callable[[float], Floats] | None = None

    def sentence(self, x: float) -> str:
        """Return the sentence with a parameter."""
        return self.said.format(x=self.names[int(x)] if self.names else f"{x:.3g}")
