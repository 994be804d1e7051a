"""The arithmetic of learning: advantages, the loss on a table of events, gradients as sums, the guarded update."""
