"""The command ``agile-trainers eval``."""
