# SPDX-License-Identifier: Apache-2.0
"""Random whole numbers from published distributions, without floating point when drawing.

Floats appear only while tables are built, and are rounded there; so a seed gives the same
numbers whatever the machine's mathematics library makes of the last bit.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import log, log1p, log2
from random import Random
from statistics import NormalDist

_BITS = 32  # of a uniform draw
_LOG_BITS = 16  # of the fraction of a logarithm
_TABLE_BITS = 12
_POWER_BITS = 40
_POWERS = [
    round(2 ** (i / (1 << _TABLE_BITS)) * (1 << _POWER_BITS)) for i in range(1 << _TABLE_BITS)
]


def _fixed_log(value: float) -> int:
    return round(log2(value) * (1 << _LOG_BITS))


def _power(fixed_log: int) -> int:
    """The inverse of _fixed_log, to the nearest whole number; for logarithms from 0."""
    whole, fraction = divmod(fixed_log, 1 << _LOG_BITS)
    power = _POWERS[fraction >> (_LOG_BITS - _TABLE_BITS)] << whole
    return (power + (1 << (_POWER_BITS - 1))) >> _POWER_BITS


class Quantiles:
    """Given by quantiles (p, value >= 1) from p = 0 to p = 1; log-linear between them."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        if points[0][0] != 0 or points[-1][0] != 1:
            raise ValueError("the quantiles must begin at 0 and end at 1")
        self._places = [round(p * 2**_BITS) for p, _ in points]
        self._logs = [_fixed_log(value) for _, value in points]

    def draw(self, random: Random) -> int:
        u = random.getrandbits(_BITS)
        right = bisect_right(self._places, u)
        left = right - 1
        width = self._places[right] - self._places[left]
        rise = self._logs[right] - self._logs[left]
        return _power(self._logs[left] + rise * (u - self._places[left]) // width)


def lognormal(mu: float, sigma: float, low: float = 1, high: float = 2**40) -> Quantiles:
    """exp of a normal distribution, clipped to [low, high]."""
    normal = NormalDist(mu, sigma)

    def value(z: float) -> float:
        # Compared as logarithms: exp of a far tail would overflow.
        exponent = min(max(mu + sigma * z, log(low)), log(high))
        return float(2 ** (exponent / log(2)))

    zs = [k / 8 for k in range(-32, 33)]
    inner = [(normal.cdf(mu + sigma * z), value(z)) for z in zs]
    return Quantiles([(0, inner[0][1]), *inner, (1, inner[-1][1])])


def lognormal_from(median: float, mean: float, high: float = 2**40) -> Quantiles:
    return lognormal(log(median), (2 * log(mean / median)) ** 0.5, high=high)


def exponential(mean: float) -> Quantiles:
    ps = [k / 256 for k in range(1, 256)] + [1 - 2.0**-k for k in range(9, 21)]
    inner = [(p, max(1.0, -mean * log1p(-p))) for p in ps]
    return Quantiles([(0, 1), *inner, (1, inner[-1][1])])


class Choice:
    """An index, drawn by weight."""

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        self._places = [round(part / total * 2**_BITS) for part in accumulate(weights)]
        self._places[-1] = 2**_BITS

    def draw(self, random: Random) -> int:
        return bisect_right(self._places, random.getrandbits(_BITS))


def zipf(count: int, exponent: float) -> Choice:
    return Choice([rank**-exponent for rank in range(1, count + 1)])


class Chance:
    """True with a given probability."""

    def __init__(self, probability: float) -> None:
        self._place = round(probability * (1 << _BITS))

    def draw(self, random: Random) -> bool:
        return random.getrandbits(_BITS) < self._place
