"""Trainers that have no adapter here, on the plain loop of `mismatch_ext.Run`."""
