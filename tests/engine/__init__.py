"""Tests of the local engine. The assertions of its helpers say what differs, as those of a test module do."""

import pytest

pytest.register_assert_rewrite("tests.engine.helpers", "tests.engine.direct")
