"""Medusa: extra heads on the target's last hidden state each guess one token further (Cai et al. 2401.10774)."""
