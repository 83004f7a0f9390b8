"""`ml_log.log_metrics`, for scripts that pass no logger on."""

from pathlib import Path

import pytest

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.runs import ml_log


def test_the_module_logs_to_what_was_set_up_last(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no logger is open; call setup_logging first"):
        ml_log.log_metrics({"a": 1})
    outer, inner = (ml_log.setup_logging(tmp_path / name, do_configure_logging_module=False) for name in ("o", "i"))
    ml_log.log_metrics({"a": 1}, step=2)
    inner.close()
    ml_log.log_metrics({"b": 2})
    outer.close()
    assert (tmp_path / "i" / "metrics.jsonl").read_text() == '{"step": 2, "a": 1}\n'
    assert (tmp_path / "o" / "metrics.jsonl").read_text() == '{"b": 2}\n'
    with pytest.raises(ConfigurationError):
        ml_log.log_metrics({"a": 1})
