"""verl's PPO trainer with the `mismatch:` block.

verl imports this package in each of its processes: by the entry point in its group `verl.plugins`, or by
`VERL_USE_EXTERNAL_MODULES=mismatch_ext.adapters.verl`. Without a block that changes nothing but wrappers around the two
functions that verl's driver calls with its configuration, which then call verl's own. docs/verl.md says what happens with one.
"""

from mismatch_ext.adapters.verl.plugin import load

load()
