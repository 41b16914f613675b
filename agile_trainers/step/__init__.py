"""One training step, in the order in which it runs: play, reward, critic, credit, log-probs, batch, token batches, loss."""
