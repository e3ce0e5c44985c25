"""No drafter: autoregressive decoding, the baseline."""
