"""Proxies: which one stands for whom, how many triplets they save, how well they bound."""
