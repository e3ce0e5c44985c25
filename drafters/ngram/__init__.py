"""Prompt lookup: what followed the last words at their last occurrence (Saxena 2023; Yang 2304.04487)."""
