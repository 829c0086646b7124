"""The log of a run, its header, and the batch that goes through it."""
