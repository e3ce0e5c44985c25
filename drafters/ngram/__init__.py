"""Prompt lookup: what followed the last words the last time they occurred (Saxena 2023; Yang et al. 2304.04487)."""
