"""What tests of the loop share."""

import pytest

from tests.fakes import FakeServiceClient
from tinker_cookbook import backends


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeServiceClient:
    fake = FakeServiceClient()
    monkeypatch.setattr(backends, "create_service_client", lambda *_: fake)
    return fake
