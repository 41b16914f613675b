"""One training step, in the order in which it runs: draw, play, reward, critic, credit, log-probs, batch, loss."""
