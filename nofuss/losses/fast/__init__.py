"""Fused forms of the losses over proxies: the same values without autograd's (B, P) matrices."""
