"""Distance metric learning with proxies."""
