"""The exact gradient of a forest of sequences, each token computed once, in memory bounded by the longest path."""
