"""The engine: one worker that trains adapters of base models and samples from their snapshots.

    engine.py            the worker: whose turn it is, and for how long
    gate.py              lockstep with the event loop of the program that submits
    models.py            base models, loaded and with what computes their passes on this device
    model/               a base model: layers, LoRA, attention, KV cache, packed passes, logprobs of targets
    sampling/            requests, scheduler, pages, prefix cache, prefill, decoding, choice of a token
    training/            datums, micro-batches, losses, gradients, the optimizer
    cuda/                what a GPU runs in place of parts of model/ and sampling/

Imports go from the worker to sampling/ and training/, from these to model/, and nowhere back.
"""
