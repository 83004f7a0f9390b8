"""Mix several sources in one order, in given proportions.

The item at a position depends only on the weights and the position, so a run resumes anywhere without replaying
earlier items.
"""

from array import array
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, isfinite, lcm
from typing import Generic, Protocol, TypeVar

from tinker_cookbook.data.rows import located
from tinker_cookbook.exceptions import ConfigurationError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def check_weights(weights: Sequence[float | Fraction] | None, num_sources: int) -> None:
    """Raises ConfigurationError unless there is a source and, if weights are given, a positive one for each."""
    if num_sources < 1:
        raise ConfigurationError("there is no source to mix; give at least one dataset")
    if weights is None:
        return
    if len(weights) != num_sources:
        raise ConfigurationError(f"weights={list(weights)}: {num_sources} sources need as many weights; give one each")
    for i, weight in enumerate(weights):
        if not (isfinite(weight) and weight > 0):
            raise ConfigurationError(f"weights[{i}]={weight}: must be greater than 0; leave the source out instead")


def apportion(total: int, weights: Sequence[float] | Sequence[Fraction]) -> list[int]:
    """Divide `total` draws in proportion to `weights`, by largest remainders (ties: the earlier one). Sums to `total`.

    Raises ConfigurationError when a weight is not positive or a share rounds to zero.
    """
    check_weights(weights, len(weights))
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    if 0 in shares:
        raise ConfigurationError(
            f"{total} draws divided by the weights {list(weights)} leave none for source {shares.index(0)}; raise the batch "
            "size or that weight"
        )
    return shares


def plan_quotas(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Draws of each source in an epoch, in proportion to the weights and at least as many as the source has rows.

    Without weights every row of every source comes once. With weights the epoch is the shortest in which every row
    comes at least once: sizes 100 and 10 with weights 0.5 and 0.5 give 100 draws each, so each row of the small one
    comes ten times.
    """
    if weights is None:
        return list(sizes)
    # The decimal that the user wrote: 0.7 is 7/10, not the nearest binary fraction, which would need one more row.
    exact = [Fraction(str(weight)) for weight in weights]
    return apportion(max(ceil(size * sum(exact) / weight) for size, weight in zip(sizes, exact, strict=True)), exact)


def source_order(weights: Sequence[float], slots: int) -> Sequence[int]:
    """The source of each slot. In any first n slots, source s has n * weights[s] / sum(weights), plus or minus one.

    The next slot goes to the source that is furthest behind its share, or the first of equals (a credit scheduler, as
    in smooth weighted round-robin). Computed exactly: no rounding error accumulates.
    """
    exact = [Fraction(weight) for weight in weights]
    unit = lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * unit) for weight in exact]
    total, credit = sum(shares), [0] * len(shares)
    chosen = array("L")
    for _ in range(slots):
        credit = [have + share for have, share in zip(credit, shares, strict=True)]
        source = credit.index(max(credit))
        credit[source] -= total
        chosen.append(source)
    return chosen


def blocks(counts: Sequence[int]) -> list[int]:
    """`counts[0]` slots of source 0, then `counts[1]` of source 1, and so on."""
    return [source for source, count in enumerate(counts) for _ in range(count)]


class Source(Protocol[T_co]):
    """A source to mix: `draw(k)` returns its k-th item, k = 0, 1, ... without end."""

    def draw(self, number: int) -> T_co: ...


class Mixer(Generic[T]):
    """The draws of several sources in one order, without omissions.

    Args:
        pattern: the index of the source at each position; it repeats after its end.
    """

    def __init__(self, sources: Sequence[Source[T]], pattern: Sequence[int]) -> None:
        self._sources, self._pattern, self._counts = sources, pattern, [0] * len(sources)
        self._ordinals = array("L")
        for source in pattern:
            self._ordinals.append(self._counts[source])
            self._counts[source] += 1

    def draw(self, position: int) -> tuple[int, T]:
        """The index of the source at a position, and its draw. Errors of the draw name the source."""
        rounds, place = divmod(position, len(self._pattern))
        source = self._pattern[place]
        with located(f"source {source} of the mixture"):
            return source, self._sources[source].draw(rounds * self._counts[source] + self._ordinals[place])

    def get_batch(self, index: int, size: int) -> list[tuple[int, T]]:
        """The draws at positions [index * size, (index + 1) * size)."""
        return [self.draw(position) for position in range(index * size, (index + 1) * size)]
