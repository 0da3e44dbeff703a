"""Hypothesis profiles: `pytest -m fuzz --hypothesis-profile=torture` tries many more examples."""

from hypothesis import settings

settings.register_profile("torture", max_examples=3000, deadline=None)
