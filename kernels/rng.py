"""Counter-based random numbers: a draw is a pure function of its key, never of the order or the batch it is made in.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), written in
int64 tensor operations, so that it runs wherever tensors do. Key = the request's seed (64 bits); counter = (position,
round, node, purpose), 32 bits each. Known answers of the paper's own test vectors: tests/test_rng.py.
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

# What a draw is for; the last word of the counter, so that streams never meet.
TARGET = 0  # a token of the target's own distribution: keyed (seed, position) alone
DRAFT = 1  # a drafted token
ACCEPT = 2  # the coin of one drafted token
RESIDUAL = 3  # the token after a rejection
NOISE = 4  # training noise
ORDER = 5  # the order of training samples in an epoch
START = 6  # the first guess at a place (Jacobi decoding)

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of Philox4x32-10: int64 tensors holding unsigned 32-bit values, shapes broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The signed product wraps modulo 2**64, which leaves both of its words right.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32) & _WORD ^ c1 ^ k0, b & _WORD, (a >> 32) & _WORD ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(
    seed: Tensor | int,
    purpose: Tensor | int,
    position: Tensor | int,
    round: Tensor | int = 0,
    node: Tensor | int = 0,
) -> Tensor:
    """Uniform float64 in [0, 1) with 52 bits for every key, shapes broadcast together.

    52 and not 53 bits: then u * total < total holds in float64 for every total, so an inverse-CDF draw cannot run past
    the last token of positive probability.
    """
    parts = [seed, purpose, position, round, node]
    device = next((x.device for x in parts if isinstance(x, Tensor)), torch.device("cpu"))
    s, kind, at, turn, which = (x if isinstance(x, Tensor) else torch.full((), signed(x), device=device) for x in parts)
    x0, x1, _, _ = philox((at & _WORD, turn & _WORD, which & _WORD, kind & _WORD), (s & _WORD, (s >> 32) & _WORD))
    return ((x0 << 20) | (x1 >> 12)).double() * 2.0**-52


def draw(p_RV: Tensor, u_R: Tensor) -> Tensor:
    """int64 [R] inverse-CDF draw: the first token whose cumulated mass exceeds u * total. p need not sum to 1; a token
    of probability 0 is never drawn."""
    cdf_RV = p_RV.double().cumsum(-1)
    return torch.searchsorted(cdf_RV, (u_R.double() * cdf_RV[:, -1])[:, None], right=True)[:, 0].clamp(
        max=p_RV.shape[1] - 1
    )


def signed(value: int) -> int:
    """The int64 whose bits are the low 64 bits of `value`."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def fresh_seed() -> int:
    """A seed from the system's entropy, for requests that bring none."""
    return secrets.randbits(63)


def fold(seed: int, number: int) -> int:
    """Another seed for the `number`-th sample of a request; number 0 keeps the seed."""
    if number == 0:
        return seed
    words = philox(
        (torch.tensor(number & _WORD), torch.tensor(number >> 32 & _WORD), torch.tensor(_WORD), torch.tensor(_WORD)),
        (torch.tensor(seed & _WORD), torch.tensor(seed >> 32 & _WORD)),
    )
    return int(words[0]) << 31 | int(words[1]) >> 1
