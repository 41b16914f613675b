"""Rewards episodes by the answers of a judge: a model behind an endpoint, or a function."""
