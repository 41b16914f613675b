"""The generator on a transformers model."""
