"""The command ``agile-trainers demo``."""
