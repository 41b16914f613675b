"""Turns messages into token ids that only ever grow at the end."""
