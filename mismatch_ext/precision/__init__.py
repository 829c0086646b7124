"""One precision on both sides: the policy, the loss scaler, the audit, and the readiness of a model."""
