"""Several processes that work as one: ranks and collectives, devices, shards of the proxies."""
