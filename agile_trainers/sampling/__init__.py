"""Makes the generator of a trainer's rollouts, and measures the gap between sampler and trainer."""
