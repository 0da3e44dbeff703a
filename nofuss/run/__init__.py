"""The run directory: what training leaves behind and every other command opens."""
