"""Generators on vLLM: an engine in this process, and a server."""
