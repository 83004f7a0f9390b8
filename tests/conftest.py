"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    """Libraries and collected tests are there to stay: each of the many collections of garbage need not look at them."""
    gc.collect()
    gc.freeze()
