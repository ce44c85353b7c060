"""Settings that every test shares."""

import signal

from hypothesis import settings

# what is started in the background of a shell ignores Ctrl-C, and so would all processes that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
# a shared machine makes single examples slow without making them wrong
settings.register_profile("pdkv", deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=5000)
settings.load_profile("pdkv")
