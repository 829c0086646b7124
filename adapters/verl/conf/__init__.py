"""Hydra configurations: `hydra.searchpath=[pkg://mismatch_ext.adapters.verl.conf] +mismatch=default`."""
