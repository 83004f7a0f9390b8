"""Several processes under torchrun that train as one: rank 0 has the clients, the other ranks run its commands."""
