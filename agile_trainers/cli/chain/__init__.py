"""The command ``agile-trainers chain``."""
