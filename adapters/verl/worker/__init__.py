"""The Ray workers that hold actor and reference, with verl's FSDP engine."""
