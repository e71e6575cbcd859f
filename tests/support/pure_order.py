"""The order of the samples, computed a second time from its definition alone: no line is shared with the library."""

from __future__ import annotations

WORD = 2**64


def global_batches(samples: int, batch: int, seed: int, epochs: int) -> dict[int, list[tuple[int, int]]]:
    """For each optimizer step of a job that nothing happens to, sorted: (epoch, sample) of its samples. They are runs
    of `batch` samples of each epoch's order; the last one of an epoch may be shorter."""
    orders = [[(epoch, sample) for sample in order(samples, seed, epoch)] for epoch in range(epochs)]
    batches = [each[start : start + batch] for each in orders for start in range(0, samples, batch)]
    return {step: sorted(each) for step, each in enumerate(batches)}


def order(samples: int, seed: int, epoch: int) -> list[int]:
    """mixer6: six rounds on k bits, from keys that absorb the seed and then the epoch; what falls outside the data
    set is mixed again."""
    bits = max(1, (samples - 1).bit_length())
    state = _mixed(_mixed(seed + 0x9E3779B97F4A7C15) ^ epoch, plus=0x9E3779B97F4A7C15)
    words = [_mixed(state + number * 0x9E3779B97F4A7C15) for number in range(1, 19)]
    rounds = [(add, 2 * (odd // 2) + 1, coin // 2**63) for add, odd, coin in zip(*[iter(words)] * 3, strict=True)]

    def mix(x: int) -> int:
        for add, multiply, coin in rounds:
            x = (x + add) * multiply % 2**bits
            x ^= x >> max(1, (bits + 1) // 2 - coin)
        return x

    found = []
    for position in range(samples):
        x = mix(position)
        while x >= samples:
            x = mix(x)
        found.append(x)
    return found


def _mixed(word: int, plus: int = 0) -> int:
    """The output function of splitmix64 (Steele, Lea and Flood)."""
    word = (word + plus) % WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)
