"""Random numbers: the paper's known answers, and keys that never collide."""

import pytest
import torch

from draftsmith.kernels import rng

# The test vectors of Philox4x32-10 published with the paper (Random123, kat_vectors): counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    words = rng.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))  # type: ignore[arg-type]
    assert tuple(map(int, words)) == answer


def test_a_draw_depends_on_its_key_alone() -> None:
    seeds_B = torch.tensor([5, -7, 1 << 40])
    together_BN = rng.uniform(seeds_B[:, None], rng.DRAFT, 3, 2, torch.arange(4))
    for b, seed in enumerate(seeds_B.tolist()):
        for n in range(4):
            assert float(rng.uniform(seed, rng.DRAFT, 3, 2, n)) == float(together_BN[b, n])
    assert float(rng.uniform(-1, 0, 0)) == float(rng.uniform((1 << 64) - 1, 0, 0))


def test_every_part_of_the_key_counts() -> None:
    base = {"seed": 11, "purpose": 1, "position": 2, "round": 3, "node": 4}
    draws = {float(rng.uniform(**base))}
    for name in base:
        for step in (1, 1 << 20):
            draws.add(float(rng.uniform(**{**base, name: base[name] + step})))
    draws.add(float(rng.uniform(11 + (1 << 40), 1, 2, 3, 4)))
    assert len(draws) == 2 + 2 * len(base)


def test_uniforms_are_uniform_and_their_streams_independent() -> None:
    at_N = torch.arange(200_000)
    streams = [rng.uniform(7, purpose, at_N) for purpose in (rng.TARGET, rng.DRAFT, rng.ACCEPT, rng.RESIDUAL)]
    for u_N in streams:
        assert float(u_N.min()) >= 0 and float(u_N.max()) < 1
        counts = torch.histc(u_N, 64, 0, 1)
        assert float(((counts - 3125) ** 2 / 3125).sum()) < 120  # 63 degrees of freedom: p = 1e-5
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(4)
    assert float(correlation.abs().max()) < 5 / 200_000**0.5


def test_fresh_and_folded_seeds_differ() -> None:
    assert len({rng.fresh_seed() for _ in range(100)}) == 100
    assert rng.fold(9, 0) == 9
    assert len({rng.fold(9, n) for n in range(1000)}) == 1000
