"""Versions of weights on disk: written atomically, described by a manifest, verified before use."""
