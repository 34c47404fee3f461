"""Hypothesis settings: machines differ in speed, so no test case has a deadline."""

from hypothesis import settings

settings.register_profile("block-mapper", deadline=None, print_blob=True)
settings.load_profile("block-mapper")
