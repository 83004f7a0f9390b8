"""The engine behind the wire protocol of the Tinker SDK: `python -m tinker_local_backend.server model=...`.

Two processes. One speaks HTTP (FastAPI on uvicorn) and keeps sessions, the order of requests and their results; the other owns
the engine. They talk over a socket pair in frames of JSON and bytes (wire/frames.py), so nothing that a client sends is unpickled
and a training step never delays a heartbeat.

The way of a call, forward_backward say: Door -> the route `forward_backward` (routes_training.py) -> Service.submit, which keeps
the order of a model's requests -> Requests.send -> EngineLink.call -> a frame -> Operations.forward_backward (operations.py) ->
TrainingClient. A sample goes from the route to Samplers.sample instead. The result comes back as a frame, becomes the reply of a
Request, and waits for the route `retrieve_future`.
"""
