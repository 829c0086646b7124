"""accelerate, and DeepSpeed and FSDP behind it: dtypes read back, weights spread over ranks, float16, the ranks themselves."""

from mismatch_ext.versions import present

present("accelerate")
