"""What a search makes of distances: exact neighbours, re-ranking, the open-set decision."""
