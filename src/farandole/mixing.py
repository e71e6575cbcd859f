"""Derive seeds from several numbers. The random numbers of a step and of a replica begin with them. Pure."""

from __future__ import annotations


def mixed(number: int) -> int:
    """Return 64 bits that look unrelated to those of any other number: a step of SplitMix64 (Steele, Lea, Flood 2014).

    Called in every step, so not a cryptographic hash.
    """
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK
    return number ^ number >> 31


_MASK = (1 << 64) - 1
