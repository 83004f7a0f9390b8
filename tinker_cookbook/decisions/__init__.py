"""Decisions: a model's probabilities of given choices as a policy, trained by a proper scoring rule.

`rules` has the scores, `data` the rows, `train` the loop, `policy` the probabilities of weights that are only asked, and
`shipped` questions whose probabilities are known.
"""
