"""Metrics as modules of the package `evaluate`, one folder each; `evaluate.load(folder)` opens them offline."""
