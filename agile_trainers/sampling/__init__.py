"""Makes the generator of a trainer's rollouts, and measures the training-inference mismatch."""
