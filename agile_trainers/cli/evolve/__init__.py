"""The command ``agile-trainers evolve``."""
