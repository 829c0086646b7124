"""torch's FSDP, whose shards more than one trainer may have: read by name, summed up, kept and put back."""
