"""Converts messages to token ids such that a conversation's ids only grow at the end."""
