"""The block with verl's Megatron engine: its settings, in the driver, and the engine, in the workers."""
