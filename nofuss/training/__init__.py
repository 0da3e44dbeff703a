"""Training: step, loop, optimizer groups, checks, checkpoints."""
