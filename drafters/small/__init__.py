"""A small language model with the target's vocabulary drafts a chain (Leviathan et al. 2211.17192)."""
