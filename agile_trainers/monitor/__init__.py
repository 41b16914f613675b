"""Monitoring of a run: metrics, rollout log, health checks."""
