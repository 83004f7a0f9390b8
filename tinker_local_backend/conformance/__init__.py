"""Whether a server of the Tinker protocol does what the official SDK expects: `python -m tinker_local_backend.conformance`.

`harness` runs checks and tells passed, failed and refused apart; `probe` is what a check asks a server through; the other
modules hold the checks, by subject. Nothing here uses the engine: the server may be anybody's.
"""
