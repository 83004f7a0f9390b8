"""Imported last by the server that processes are forked from: their collections of garbage need not look at the libraries."""

import gc

gc.collect()
gc.freeze()
