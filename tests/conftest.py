"""What holds for all tests."""

import gc
from contextlib import suppress

with suppress(ImportError):  # an environment for a few of the tests
    from hypothesis import HealthCheck, settings

    settings.register_profile("no clock", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no clock")


def pytest_collection_finish() -> None:
    """Libraries and collected tests are there to stay: each of the many collections of garbage need not look at them."""
    gc.collect()
    gc.freeze()
