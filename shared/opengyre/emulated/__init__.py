"""An accelerator without a model: how long calls take on it and which tokens they give. Pure; needs no torch."""
