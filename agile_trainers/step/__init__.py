"""One training step, in the order in which it runs: play, reward, log-probs, credit, batch, token batches."""
