"""Dialects of chat clients: each reads a request's body, and writes an answer whole or as the events of a stream."""
