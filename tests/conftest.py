"""What holds for all tests."""

from hypothesis import settings

# A time says how busy the machine is, and nothing about the code.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")
