"""The gyre on a virtual clock: the allocator's own policy, fed by a model of rollout, training and switches."""
