"""The earlier name of recipes.rl."""

from recipes.__main__ import refuse

if __name__ == "__main__":
    refuse("env_rl")
