"""Readers: from one kind of file or folder to a `Collection`."""
