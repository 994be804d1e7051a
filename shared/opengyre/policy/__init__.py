"""Opening a model directory as a policy that can be trained: our tiny decoder, or a causal model of `transformers`."""
