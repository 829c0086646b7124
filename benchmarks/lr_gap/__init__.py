"""Learning rate against gap, with and without learning-rate control, and with a control whose gap is zero."""
