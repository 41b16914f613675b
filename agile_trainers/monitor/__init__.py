"""Monitoring of a run: metrics, logs, episode records, health checks."""
