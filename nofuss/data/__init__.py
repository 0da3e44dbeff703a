"""Data: from whatever the user has to batches of inputs and labels.

open → readers/ (folder | table | arrays | shards | benchmarks | glyphs | han) → Collection
Collection → scan (what can't be used) → split
sampling (which items) → loader (decode, transforms) → Batch(inputs, labels, indices)

Nothing is imported here, so that a process that only decodes pictures needs no torch.
"""
