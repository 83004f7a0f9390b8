"""Compiled constraints: which tokens may come next, as packed bits, for the rows of a batch.

llguidance (an optional dependency, the extra `constrain`) computes a mask from its parser state in tens of microseconds,
without a table of all states. It refuses the parts of JSON schema that it does not implement. Stop tokens are handled here: a
stop token is allowed exactly where the text so far is complete, whatever the grammar says about its text.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from tinker_local_backend.constraint import ONE_LINE, Constraint
from tinker_local_backend.engine.model.base_model import BaseModel
from tinker_local_backend.errors import RequestError

MAX_GRAMMARS = 64
"""Compiled constraints cached per model, in LRU order."""

PARALLEL_ROWS = 8
"""Minimum number of rows for which masks are computed on several threads."""

Bits = npt.NDArray[np.int32]
"""Bit i % 32 of word i // 32 is set if token i is allowed."""


class Matcher:
    """The constraint's state for one sample.

    Args:
        ends: tokens that end the sample; allowed exactly where the text is complete.
    """

    def __init__(self, state: Any, constraint: Constraint, words: int, ends: Iterable[int], own_ends: Iterable[int]):
        self.state, self.words, self._constraint, self._ends = state, words, constraint, frozenset(ends)
        self._cleared, self._set = _words({*self._ends, *own_ends}), _words(self._ends)
        self.problem: str | None = None
        """why no token can follow; None if one can"""

    def finish(self, bits_W: Bits) -> None:
        """Set or clear the stop tokens in the bits that llguidance computed. Sets `problem` if no bit is left."""
        accepts = self.state.is_accepting()
        for word, mask in self._cleared:
            bits_W[word] &= ~mask
        if accepts:
            for word, mask in self._set:
                bits_W[word] |= mask
        if self.state.is_error():
            self._fail(self.state.get_error())
        elif not accepts and not bits_W.any():
            self._fail("no token of the model's vocabulary continues the text")
        if self.problem is not None:
            bits_W[:] = 0

    def consume(self, token: int) -> bool:
        """Advance by a token that does not end the sample. Returns whether the constraint allows it."""
        return bool(self.state.consume_token(token))

    def allows(self, token: int, bits_W: Bits) -> bool:
        return bool(int(bits_W[token // 32]) >> token % 32 & 1)

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def _fail(self, why: str) -> None:
        kind = self._constraint.kind
        self.problem = f"constraint {kind} cannot continue here: {why.strip():.500}; change it, or the stop tokens"


class Grammar:
    """A constraint compiled for the tokens of a model."""

    def __init__(self, constraint: Constraint, vocabulary: _Vocabulary):
        self._constraint, self._own_ends = constraint, vocabulary.ends
        self.words = vocabulary.words
        matcher = vocabulary.library.LLMatcher
        self._state = matcher(vocabulary.tokenizer, _source(matcher, constraint), log_level=0)
        if self._state.is_error():
            why = self._state.get_error().strip()
            raise RequestError(f"constraint {constraint.kind} cannot be compiled: {why:.1000}; change that part of it")

    def matcher(self, ends: Iterable[int]) -> Matcher:
        """A new sample's state. `ends`: the tokens that may end it."""
        return Matcher(self._state.deep_copy(), self._constraint, self.words, ends, self._own_ends)


def _source(matcher: Any, constraint: Constraint) -> str:
    value = getattr(constraint, constraint.kind)
    try:
        if constraint.kind == "json_schema":
            return matcher.grammar_from_json_schema(value, defaults=ONE_LINE)
        if constraint.kind == "regex":
            return matcher.grammar_from_regex(value)
        if constraint.kind == "choices":  # Lark string literals have JSON's syntax
            return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
        return matcher.grammar_from_lark(value)
    except ValueError as error:
        raise RequestError(
            f"constraint {constraint.kind} cannot be compiled: {error}; change that part of it"
        ) from None


class _Vocabulary:
    """A model's tokens in llguidance's form, and a cache of the constraints compiled for them."""

    def __init__(self, model: BaseModel):
        self.library = _library()
        self.ends = sorted(model.eos_token_ids)
        backend = getattr(model.tokenizer, "backend_tokenizer", None)
        if backend is None or not self.ends:
            lack = "end-of-sequence token" if backend else "fast tokenizer (a tokenizer.json)"
            raise RequestError(f"constraint: model {model.name!r} has no {lack}; sample from it without a constraint")
        size = max(model.vocab_size, len(model.tokenizer))
        try:
            self.tokenizer = self.library.LLTokenizer(backend.to_str(), n_vocab=size, eos_token=self.ends)
        except ValueError as error:
            raise RequestError(
                f"constraint: llguidance does not know this kind of tokenizer, that of {model.name!r} ({error}); sample from it "
                "without a constraint"
            ) from None
        self.words = (size + 31) // 32
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def grammar(self, constraint: Constraint) -> Grammar:
        key = constraint.key
        with self._lock:
            if (cached := self._grammars.get(key)) is not None:
                self._grammars.move_to_end(key)
                return cached
        grammar = Grammar(constraint, self)  # without the lock: it may take a second
        with self._lock:
            grammar = self._grammars.setdefault(key, grammar)
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar


_vocabularies: WeakKeyDictionary[BaseModel, _Vocabulary] = WeakKeyDictionary()
_lock = threading.Lock()


def grammar_of(constraint: Constraint, model: BaseModel) -> Grammar:
    """The constraint compiled for the model's tokens, from the cache if it is there. Thread-safe.

    Raises:
        RequestError: llguidance is missing, or cannot compile this constraint or use this tokenizer.
    """
    with _lock:
        vocabulary = _vocabularies.get(model)
    if vocabulary is None:
        new = _Vocabulary(model)  # without the lock: for a large vocabulary it takes seconds
        with _lock:
            vocabulary = _vocabularies.setdefault(model, new)
    return vocabulary.grammar(constraint)


@cache
def _executor(process: int, threads: int) -> Any:
    """An executor with as many threads as torch. One per process: threads do not survive a fork."""
    return _library().LLExecutor(threads)


def _library() -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        raise RequestError(
            "constraint needs the package llguidance, which is not installed: pip install 'llguidance>=1.9'",
            remote="constraint: this server has no llguidance; leave out the constraint",
        ) from None


def masks_of(matchers: Sequence[Matcher | None]) -> Bits:
    """The allowed tokens of each row, (rows, words): all for a row without a constraint. At least one row must have one."""
    rows = [(i, matcher) for i, matcher in enumerate(matchers) if matcher is not None]
    words = rows[0][1].words
    bits_RW = np.full((len(matchers), words), -1, dtype=np.int32)
    pointer, stride = bits_RW.ctypes.data, words * 4
    if len(rows) >= PARALLEL_ROWS:
        executor = _executor(os.getpid(), torch.get_num_threads())
        executor.unsafe_compute_mask_ptr([(m.state, i) for i, m in rows], pointer, stride, len(matchers))
    else:
        for i, matcher in rows:
            matcher.state.unsafe_compute_mask_ptr(pointer + i * stride, stride)
    for i, matcher in rows:
        matcher.finish(bits_RW[i])
    return bits_RW


def _words(tokens: Iterable[int]) -> list[tuple[int, Any]]:
    """(index of the word, int32 with the token's bit) for each token."""
    return [(token // 32, np.array(1 << token % 32, dtype=np.uint32).view(np.int32)[()]) for token in tokens]
