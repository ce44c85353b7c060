"""Settings that every test shares."""

from hypothesis import settings

# a shared machine makes single examples slow without making them wrong
settings.register_profile("pdkv", deadline=None)
settings.load_profile("pdkv")
