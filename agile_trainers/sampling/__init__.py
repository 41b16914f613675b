"""Chooses what a trainer samples with, and measures the gap between sampler and trainer."""
