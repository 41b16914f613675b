"""Forward passes that compute each distinct prefix of a batch once."""
