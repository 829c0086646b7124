"""verl's PPO trainer with the `mismatch:` block.

verl imports this package in each of its processes: by the entry point in its group `verl.plugins`, or by
`VERL_USE_EXTERNAL_MODULES=mismatch_ext.adapters.verl`. Without a block this only wraps the two functions that verl's driver calls
with its configuration, and the wrappers call verl's own. docs/verl.md says what happens with a block.
"""

from mismatch_ext.adapters.verl.plugin import load

load()
