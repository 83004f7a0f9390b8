"""The engine behind the wire protocol of the Tinker SDK: `python -m tinker_local_backend.server model=...`.

Two processes. One speaks HTTP (FastAPI on uvicorn) and keeps sessions, the order of requests and their results; the other owns
the engine. They talk over a socket pair in frames of JSON and bytes (wire/frames.py), so nothing that a client sends is unpickled
and a training step never delays a heartbeat.
"""
