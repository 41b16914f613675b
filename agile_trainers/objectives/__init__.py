"""The mathematics of turn-level credit, as pure functions of tensors. Imports nothing else of the package."""
