"""The procedural generators of the package reasoning-gym as environments: `env=reasoning_gym:leg_counting`
(docs/reasoning_gym.md).
"""
