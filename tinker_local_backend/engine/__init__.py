"""The engine: one worker that trains adapters of base models and samples from their snapshots.

    engine.py            the worker: whose turn it is, and for how long
    gate.py              lockstep with the event loop of the program that submits
    models.py            loads a base model and chooses how its passes run on this device
    model/               a base model: layers, LoRA, attention, KV cache, packed passes, logprobs of targets
    sampling/            requests, scheduler, pages, prefix cache, prefill, decoding, choice of a token
    training/            datums, micro-batches, losses, gradients, the optimizer
    cuda/                replacements for parts of model/ and sampling/ on a GPU

Imports go from the worker to sampling/ and training/, from these to model/, and nowhere back.
"""
