"""The command line, ``agile-trainers``."""
