"""Plays episodes: environments on one side, a sampler on the other."""
