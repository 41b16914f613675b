"""Isolates programs and functions that run on a model's text."""
