"""Multi-turn reinforcement learning for language models, on top of TRL."""

__version__ = "0.1.0"
