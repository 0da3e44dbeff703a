"""What the user sees in the terminal, and Ctrl-C."""
