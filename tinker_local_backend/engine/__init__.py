"""The engine: one worker that trains adapters of base models and samples from their snapshots.

    engine.py            the worker thread, which schedules operations and sampler steps
    gate.py              lockstep with the client's event loop
    models.py            loads base models and selects the code path for their device
    model/               a base model: layers, LoRA, attention, KV cache, packed passes, logprobs of targets
    sampling/            requests, scheduler, pages, prefix cache, prefill, decoding, choice of tokens
    training/            datums, micro-batches, losses, gradients, the optimizer
    cuda/                replacements for parts of model/ and sampling/ on a GPU

The worker imports sampling/ and training/, and these import model/; never the other way round.
"""
