"""What all trained drafters share: answers of the target to learn from, a frozen teacher, one training loop.

- shards.py: the answers on disk
- batches.py: the answers as padded batches
- vocabulary.py: a reduced draft vocabulary and its way back
- teacher.py: the frozen target's features and soft targets
- losses.py: what is minimised
- trainable.py: what a drafter implements to be trained
- optimizer.py: AdamW or Muon
- validation.py: per-depth acceptance and agreement on held-out answers
- loop.py: the loop, its states to go on from after a kill
"""
