"""Files of ours: written whole or not at all, read only if regular, one writer at a time."""
