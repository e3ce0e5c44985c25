"""Medusa: heads on the target's last hidden state, each guessing one token ahead (2401.10774)."""
