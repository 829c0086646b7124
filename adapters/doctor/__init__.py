"""`mismatch-ext doctor`: sample with the engine, score with the trainer, name why they differ, and try the remedy."""
