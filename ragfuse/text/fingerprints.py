"""Fingerprints of parts of a text, each in constant time after one pass over the text (Karp and Rabin, 1987).

There are two kinds. `Residues` is for a few parts and for signatures: the bytes of a part as one number, modulo a
secret prime. `Fingerprints` is for very many parts: the letters of a part as coefficients of a polynomial, evaluated at
a secret point modulo 2**61 - 1, in arrays. Who does not know the secret can find two texts with equal fingerprints only
by chance.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

MODULUS = (1 << 61) - 1
"""The prime of `Fingerprints`: two texts of n letters have equal fingerprints with a probability of n / 2**61."""
CACHED_POWERS = 1 << 17
"""The most powers of a point that are kept for the next text: 2 MB."""
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89)


def secret_prime(key: bytes) -> int:
    """Return a prime of 128 bits that is derived from a key of 32 bytes."""
    for number in count():
        drawn = int.from_bytes(blake3(number.to_bytes(8, "little"), key=key).digest(16), "little")
        candidate = drawn | 1 << 127 | 1
        if _is_prime(candidate):
            return candidate
    raise AssertionError("unreachable: the numbers do not end")


def residue(text: str, prime: int) -> int:
    """Return the UTF-8 bytes of a text, read as one big-endian number, modulo a prime."""
    return int.from_bytes(_bytes(text), "big") % prime


class Residues:
    """Fingerprints of the parts of a text between given places; the constructor reads the text once."""

    def __init__(self, text: str, places: Iterable[int], prime: int) -> None:
        self._prime = prime
        places = sorted(set(places))
        self._at = {place: number for number, place in enumerate(places)}
        # For the n bytes before each place: their residue, 256**n and 256**-n. These are three lists of numbers because
        # a tuple for each place would be one more object that the garbage collector has to visit.
        self._before, self._powers, self._back = list[int](), list[int](), list[int]()
        value, power, back, at = 0, 1, 1, 0
        unit = pow(256, -1, prime)
        for place in places:
            data = _bytes(text[at:place])
            step = pow(256, len(data), prime)
            value = (value * step + int.from_bytes(data, "big")) % prime
            power, back, at = power * step % prime, back * pow(unit, len(data), prime) % prime, place
            self._before.append(value)
            self._powers.append(power)
            self._back.append(back)

    def of(self, lo: int, hi: int) -> int:
        """Return `residue(text[lo:hi], prime)`; lo <= hi are two of the given places."""
        first, last = self._at[lo], self._at[hi]
        shift = self._powers[last] * self._back[first] % self._prime
        return (self._before[last] - self._before[first] * shift) % self._prime


class EvaluationPoint:
    """A secret point at which polynomials are evaluated, with its powers and those of its inverse."""

    def __init__(self, value: int) -> None:
        self._value, self._inverse = value, pow(value, -1, MODULUS)
        self._powers, self._back = np.ones(1, np.uint64), np.ones(1, np.uint64)

    def powers(self, n: int) -> tuple[Numbers, Numbers]:
        """Return the first n powers of the point and of its inverse, uint64 [n] each."""
        if n <= len(self._powers):
            return self._powers[:n], self._back[:n]
        size = max(n, min(2 * len(self._powers), CACHED_POWERS))
        powers, back = _powers(self._value, size), _powers(self._inverse, size)
        if size <= CACHED_POWERS:
            self._powers, self._back = powers, back
        return powers[:n], back[:n]

    def fingerprint(self, text: str) -> int:
        """Return the fingerprint of one short text, equal to that of `Fingerprints`."""
        found = 0
        for letter in reversed(text):
            found = (found * self._value + ord(letter) + 1) % MODULUS
        return found


class Fingerprints:
    """Fingerprints of all parts of a text of n letters: the sum over i of (code point of letter i + 1) * point**i."""

    def __init__(self, text: str, point: EvaluationPoint) -> None:
        letters = codes(text)
        powers, self._back = point.powers(len(letters) + 1)
        self._sums = _prefix_sums(_product(letters + 1, powers[:-1]))

    def __len__(self) -> int:
        return len(self._back) - 1

    def of(self, places: NDArray[np.int64], sizes: NDArray[np.int64]) -> Numbers:
        """Return the fingerprints of the parts places : places + sizes, which lie within the text."""
        return _product(_modulo(self._sums[places + sizes] + MODULUS - self._sums[places]), self._back[places])

    def of_size(self, size: int) -> Numbers:
        """Return the fingerprints of all parts of this size, in order; uint64 [n - size + 1], or none."""
        n = max(0, len(self) + 1 - size)
        ends = self._sums[len(self._sums) - n :]
        return _product(_modulo(ends + MODULUS - self._sums[:n]), self._back[:n])


def codes(text: str) -> Numbers:
    """Return the code points of a text, lone surrogates too; uint64 [n]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)


def _powers(value: int, n: int) -> Numbers:
    found, size, step = np.ones(n, np.uint64), 1, value
    while size < n:
        n_new = min(size, n - size)
        found[size : size + n_new] = _product(found[:n_new], step)
        size, step = size + n_new, step * step % MODULUS
    return found


def _product(a: Numbers, b: Numbers | int) -> Numbers:
    """Multiply numbers below the modulus, modulo it.

    They are split at bit 31, so that no intermediate result exceeds 64 bits; modulo 2**61 - 1, 2**61 is 1 and 2**62 is
    2.
    """
    a_low, a_high, b_low, b_high = a & 0x7FFFFFFF, a >> 31, b & 0x7FFFFFFF, b >> 31
    middle = a_high * b_low + a_low * b_high
    total: Numbers = (a_high * b_high << 1) + (middle >> 30) + ((middle & 0x3FFFFFFF) << 31) + a_low * b_low
    return _modulo(total)


def _modulo(numbers: Numbers) -> Numbers:
    """Return numbers modulo `MODULUS`."""
    once = (numbers & MODULUS) + (numbers >> 61)
    return np.where(once >= MODULUS, once - MODULUS, once)


def _prefix_sums(numbers: Numbers) -> Numbers:
    """Return 0 and the sums of the first 1, 2, ... numbers, modulo `MODULUS`; fewer than 2**31 numbers."""
    low, high = np.cumsum(numbers & 0xFFFFFFFF), np.cumsum(numbers >> 32)
    shifted = ((high & 0x1FFFFFFF) << 32) + (high >> 29)  # times 2**32
    return np.concatenate([np.zeros(1, np.uint64), _modulo(_modulo(low) + _modulo(shifted))])


def _is_prime(number: int) -> bool:
    """Return whether a number is prime (Miller-Rabin test); at most one of 2**48 random numbers is misjudged."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
