"""Shards of torch's FSDP, for every trainer that uses it: they are read by name, summed up, kept and put back."""
