"""Episode records on disk: their columns, and how they are written and read."""
