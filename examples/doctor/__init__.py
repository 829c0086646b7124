"""What the stories of docs/doctor.md need: prompts, a configuration of TRL, and a run with a LoRA adapter."""
