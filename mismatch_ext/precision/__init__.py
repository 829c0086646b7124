"""One precision in trainer and engine: the policy, the loss scaler, the audit, and the readiness of a model."""
