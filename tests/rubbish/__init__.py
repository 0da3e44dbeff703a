"""The catalogue of rubbish that commands may be given; `tests/test_rubbish.py` tries all of it.

An entry is how to make the rubbish (in an empty folder; returns the words of the command), the exit
code, and what is said. Exit 0 means that the rest was trained on.
"""
