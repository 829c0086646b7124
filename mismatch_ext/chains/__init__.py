"""Turns of a conversation: whether each extends the one before, and if not, where and why."""
