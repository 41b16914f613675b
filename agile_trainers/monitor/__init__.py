"""What a run says of itself: metrics, logs, episode records, health checks."""
