"""What a run's own pass over a batch does that a plain pass of its model does not: other layouts of the batch, and dropout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from mismatch_ext.adapters.transformers.doctor.scorer import LAYOUTS, Scorer, mixes_packed
from mismatch_ext.adapters.transformers.scoring import active_dropout

from mismatch_ext.doctor import Diagnosis, remedy
from mismatch_ext.doctor.diagnose import taken_apart
from mismatch_ext.doctor.sample import Floats
from mismatch_ext.rng import forked_rng

# Dropout is what a run's own pass has if it moves the model's by as much, up to this factor: no two passes drop the same.
ALIKE = 2.0
# The remedy of each layout that is tried.
TRIED = {"left": "layout", "left-positions": "", "packed": "packed"}


def with_run_pass(
    diagnosis: Diagnosis, scorer: Scorer, computed: Floats, *, replays: bool, prompt_width: int
) -> Diagnosis:
    """Return the diagnosis with what the run's pass does differently, if its difference is the cause "layout".

    `computed` are the log-probabilities of that pass `[N]`, `replays` says whether it replayed the sample's routes, and
    `prompt_width` how wide its prompts were with their padding, in tokens.
    """
    if not any(cause.key == "layout" for cause in diagnosis.causes):
        return diagnosis
    routes = scorer.sample.routes if replays else None

    def scored(layout: str, *, training: bool = False) -> Floats:
        return scorer.in_layout(scorer.sample, layout, routes=routes, training=training, prompt_width=prompt_width)

    plain = scored("right")
    if active := active_dropout(scorer.model):
        with forked_rng(next(scorer.model.parameters()).device):
            dropped = scored("right", training=True)
        moved, gap = float(np.abs(dropped - plain).mean()), float(np.abs(computed - plain).mean())
        if gap / ALIKE <= moved <= gap * ALIKE:
            reason = (
                f"dropout is active in the run's own pass ({', '.join(active)}): it moves this model by {moved:.1e}, and the "
                f"pass is off by {gap:.1e}"
            )
            causes = tuple(
                replace(cause, key="dropout", said=reason, remedy=remedy("dropout")) if cause.key == "layout" else cause
                for cause in diagnosis.causes
            )
            return replace(diagnosis, causes=causes)
    layouts = [layout for layout in TRIED if layout != "packed" or not mixes_packed(scorer.model)]
    return taken_apart(
        diagnosis, computed, plain, {LAYOUTS[layout]: (TRIED[layout], scored(layout)) for layout in layouts}
    )
