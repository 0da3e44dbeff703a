"""Several processes as one: who takes part, which device each has, sums over all, shards."""
