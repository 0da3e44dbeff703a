"""The losses over proxies for many proxies: the same values, without a (B, P) matrix."""
