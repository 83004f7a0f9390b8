"""Several processes under torchrun that train as one: rank 0 holds the clients, the others follow."""
