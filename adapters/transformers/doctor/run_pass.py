"""What a run's own pass over a batch does that a plain pass of its model does not: other layouts of the batch, and dropout."""

from __future__ import annotations

import numpy as np
from mismatch_ext.adapters.transformers.doctor.scorer import LAYOUTS, Scorer, mixes_packed
from mismatch_ext.adapters.transformers.scoring import active_dropout

from mismatch_ext.doctor.evidence import RunPass
from mismatch_ext.doctor.sample import Floats
from mismatch_ext.rng import forked_rng

# Dropout is what a run's own pass has if it moves the model's by as much, up to this factor: no two passes drop the same.
ALIKE = 2.0
# The remedy of each layout that is tried.
TRIED = {"left": "layout", "left-positions": "", "packed": "packed"}


def try_run_pass(scorer: Scorer, computed: Floats, *, replays: bool, prompt_width: int) -> RunPass:
    """Try what a run's pass may do otherwise than a plain one.

    `computed` are the log-probabilities of that pass `[N]`, `replays` says whether it replayed the sample's routes, and
    `prompt_width` how wide its prompts were with their padding, in tokens.
    """
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
            return RunPass(computed=computed, plain=plain, dropout=reason)
    layouts = [layout for layout in TRIED if layout != "packed" or not mixes_packed(scorer.model)]
    tries = {LAYOUTS[layout]: (TRIED[layout], scored(layout)) for layout in layouts}
    return RunPass(computed=computed, plain=plain, tries=tries)
