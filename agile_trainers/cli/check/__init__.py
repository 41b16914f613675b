"""The command ``agile-trainers check``."""
