"""Models: a backbone that turns inputs into features, and a linear head that embeds them."""
