"""Pure functions from tensors to tensors: the mathematics of turn-level credit. Imports nothing else of the package."""
