"""What verl needs to run on a CPU: a platform, repairs of its environment, data, a reward and injected faults."""
