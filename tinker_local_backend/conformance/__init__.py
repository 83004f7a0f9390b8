"""Checks that a server of the Tinker protocol does what the official SDK expects: `python -m tinker_local_backend.conformance`.

`harness` runs checks and sorts them into passed, failed and refused; `probe` holds the SDK clients of one check; the other
modules hold the checks, by subject. Nothing here uses the engine, so any server of the protocol can be checked.
"""
