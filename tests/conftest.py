"""Settings that every test shares."""

from hypothesis import settings

# a shared machine makes single examples slow without making them wrong
settings.register_profile("pdkv", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=5000)
settings.load_profile("pdkv")
