"""Saves an adapter that is new for a program that asks for a checkpoint: python -m tests.ecosystem.checkpoint MODEL

It goes to TINKER_LOCAL_HOME; its tinker:// path is printed.
"""

import sys

from tinker_local_backend import ServiceClient

if __name__ == "__main__":
    client = ServiceClient().create_lora_training_client(base_model=sys.argv[1], rank=8, seed=0)
    print(client.save_weights_for_sampler("given").result().path)
