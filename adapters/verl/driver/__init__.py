"""The process that trains with verl's `PPOTrainer`: it asks every other process, and sees whole batches."""
