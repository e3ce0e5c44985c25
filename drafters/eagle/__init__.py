"""EAGLE: a small head that continues the target's own hidden states (2401.15077, 2406.16858, 2503.01840)."""
