"""Several processes that work as one: rendezvous, devices, collectives, shards of the proxies."""
