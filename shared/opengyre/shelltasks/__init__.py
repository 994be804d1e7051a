"""Shell tasks for the tiny policy: their generator, their scripted demonstrator, the warm start of a policy on them."""
