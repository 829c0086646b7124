"""The trainer's side of the doctor: models that are changed as an engine may differ, and what they make of the sampled tokens."""
