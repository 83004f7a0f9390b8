"""The earlier name of recipes.rl."""

from recipes.__main__ import main

if __name__ == "__main__":
    main(["env_rl"])
