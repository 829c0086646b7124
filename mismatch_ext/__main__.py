"""The command line as a module: `python -m mismatch_ext compat` is `mismatch-ext compat`."""

import sys
from importlib import import_module

if __name__ == "__main__":
    # By name: the subcommands that need a peer are the adapters', which the core does not import.
    sys.exit(import_module("mismatch_ext.adapters.cli").main())
