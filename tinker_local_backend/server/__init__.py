"""The engine behind the wire protocol of the Tinker SDK: `python -m tinker_local_backend.server model=...`.

Two processes. One speaks HTTP (FastAPI on uvicorn) and keeps sessions, the order of requests and their results; the other owns
the engine. They talk over a socket pair in frames of JSON and bytes (wire/frames.py), so nothing that a client sends is unpickled
and a training step never delays a heartbeat.

Path of a call such as forward_backward: Gateway -> route `forward_backward` (routes_training.py) -> Service.submit, which orders
a model's requests -> Requests.send -> EngineLink.call -> frame -> Operations.forward_backward (operations.py) -> TrainingClient.
Routes of sampling call Samplers.sample instead. The result returns as a frame, and `retrieve_future` reads it from its Request.
"""
