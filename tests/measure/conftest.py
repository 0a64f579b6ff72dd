"""Property tests without a clock: a busy machine fails nothing."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
