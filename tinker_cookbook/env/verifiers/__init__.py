"""Tasksets of the package verifiers (0.4): trained here, and environments of ours offered as such tasksets.

`dataset` and `config` import it where they need it; the other modules import it at their top. It is the extra `verifiers`.
"""
