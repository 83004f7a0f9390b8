"""Record each call of a client as a line of JSON, with its caller's tags.

    exporter = CaptureExporter(JsonlFileSink(LocalStorage(log_path)))
    instrument_tinker(exporter)
    with capture(split="train", iteration=3):
        ...  # every sample and training call here is written to capture/sample.jsonl or capture/train_op.jsonl
    exporter.shutdown()

There is no SQL store and no HTTP proxy: importing `capture.store` or `capture.proxy` raises an error that names the
alternative.
"""

from tinker_cookbook.utils.lazy import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "exporter": "CaptureExporter CaptureSink JsonlFileSink",
        "instrument": "instrument_tinker uninstrument_tinker",
        "scope": "RESERVED_KEYS capture current_scope",
    },
)
