"""A small verifiable reasoning task and the language models trained on it from scratch."""
