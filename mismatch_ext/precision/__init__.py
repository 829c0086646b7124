"""One precision in trainer and engine: the loss scaler, the audit, and the readiness of a model."""
