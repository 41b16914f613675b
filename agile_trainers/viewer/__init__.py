"""Shows the rollout logs of runs: one HTML file that opens offline, or a local server that follows a run."""
