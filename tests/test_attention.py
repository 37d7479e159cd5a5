"""Attention over ranges of keys against all scores: float64, values and gradients, every way that there is.

pytest tests/test_attention.py
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.models import attention
from draftsmith.models.attention import Ranges, attend_ranges


def document(length: int, rows: list[int], start: int = 0) -> list[tuple[int, int]]:
    """Of a document that begins at `start`: each of the rows sees it up to itself."""
    return [(start, start + row + 1) for row in rows if row < length]


N = 400
CASES: dict[str, list[tuple[int, int]]] = {
    "one document": document(200, list(range(200))),
    "an answer": document(200, list(range(77, 170))),
    "every third": document(300, list(range(2, 300, 3))),
    "far apart": document(N, [0, 1, 130, 131, 399]),
    "packed": [
        *document(50, list(range(50))),
        *document(3, [0, 2], 50),
        *document(200, [*range(40), *range(90, 95), *range(110, 200)], 53),
        *document(140, list(range(100, 140)), 260),
    ],
    "alone": document(1, [0], 17),
    "two of one stop": [(5, 9), (5, 9), (5, 9), *document(60, list(range(4, 60)), 5)],
    "nothing to see": [(0, 0), *document(90, list(range(90))), (90, 90), (90, 80), *document(60, list(range(50)), 90)],
    "none": [],
}


def reference(q_RHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, see_RN: Tensor, own: Any = ()) -> Tensor:
    """By all scores; 0 where a query sees nothing."""
    times = q_RHd.shape[1] // k_NGd.shape[1]
    k_NHd, v_NHd = (x.repeat_interleave(times, 1) for x in (k_NGd, v_NGd))
    scale = q_RHd.shape[-1] ** -0.5
    scores_RHS = (torch.einsum("rhd,nhd->rhn", q_RHd, k_NHd) * scale).masked_fill(~see_RN[:, None], -torch.inf)
    more = [((q_RHd * k.repeat_interleave(times, 1)).sum(-1) * scale)[..., None] for k, _ in own]
    weights_RHS = torch.cat([scores_RHS, *more], -1)
    blind_R11 = (weights_RHS == -torch.inf).all(-1, keepdim=True)
    weights_RHS = weights_RHS.masked_fill(blind_R11, 0).softmax(-1).masked_fill(blind_R11, 0)
    out_RHd = torch.einsum("rhn,nhd->rhd", weights_RHS[..., : len(k_NGd)], v_NHd)
    for i, (_, v) in enumerate(own):
        out_RHd = out_RHd + weights_RHS[..., len(k_NGd) + i, None] * v.repeat_interleave(times, 1)
    return out_RHd


def inputs(rows: int, heads: int, groups: int, own: int, dtype: torch.dtype, keys: int = N) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(rows, heads, 8), (keys, groups, 8), (keys, groups, 8), *[(rows, groups, 8)] * (2 * own)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def bounds(case: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """first_R, stop_R, and who sees whom [R, N]."""
    first_R, stop_R = torch.tensor(case, dtype=torch.int64).reshape(-1, 2).unbind(1)
    at_N = torch.arange(N)
    return first_R, stop_R, (at_N >= first_R[:, None]) & (at_N < stop_R[:, None])


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_all_scores(case: str, own: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """float64, 1e-12: with PyTorch's kernel, and without it, in tiles of TILE queries, as on any device; forward of flex
    attention (its backward has no form for CPUs)."""
    first_R, stop_R, see_RN = bounds(CASES[case])
    if own and case == "nothing to see":
        see_RN = see_RN.clone()
    given = inputs(len(first_R), *heads, own, torch.float64)
    pairs = list(zip(given[3::2], given[4::2], strict=True))
    want = reference(*given[:3], see_RN, pairs)
    weights = torch.randn_like(want)
    slopes = torch.autograd.grad((want * weights).sum(), given)

    def compare(ranges: Ranges) -> None:
        got = attend_ranges(*given[:3], ranges, pairs)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        if len(first_R):
            found = torch.autograd.grad((got * weights).sum(), given)
            for a, b in zip(found, slopes, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)

    compare(Ranges(first_R, stop_R, N))
    ranges = Ranges(first_R, stop_R, N)
    ranges.tiles = attention.tiles(first_R, ranges.stop_R, False) if len(first_R) else []
    assert all(tile.queries.stop - tile.queries.start <= attention.TILE for tile in ranges.tiles)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "fused", lambda *_: False)
        compare(ranges)
    if case != "nothing to see":
        with torch.no_grad():
            got = attend_ranges(*given[:3], Ranges(first_R, stop_R, N, flex=True), pairs)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    first_R, stop_R, _ = bounds([(0, 2), (0, 3), (4, 6), (4, 9)])
    given = inputs(4, 4, 2, 2, torch.float64, keys=9)

    def run(*xs: Tensor) -> Tensor:
        return attend_ranges(*xs[:3], Ranges(first_R, stop_R, 9), list(zip(xs[3::2], xs[4::2], strict=True)))

    assert torch.autograd.gradcheck(run, given)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    """Of the largest entry; bf16 keeps 8 bits, and the output of every part is rounded."""
    first_R, stop_R, see_RN = bounds(CASES["packed"])
    given = inputs(len(first_R), 6, 2, 2, dtype)
    pairs = list(zip(given[3::2], given[4::2], strict=True))
    got = attend_ranges(*given[:3], Ranges(first_R, stop_R, N), pairs)
    assert got.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in given]
    want = reference(*exact[:3], see_RN, list(zip(exact[3::2], exact[4::2], strict=True)))
    weights = torch.randn_like(want)
    found = torch.autograd.grad((got * weights.to(dtype)).sum(), given)
    slopes = torch.autograd.grad((want * weights).sum(), exact)
    for a, b in zip((got, *found), (want, *slopes), strict=True):
        assert float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max()) < tolerance


def test_on_the_device_at_hand() -> None:
    """Values and gradients where training would run: flex attention, compiled, on CUDA. fp32, products in TF32 at worst."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first_R, stop_R, see_RN = bounds(CASES["packed"])
    given = inputs(len(first_R), 6, 2, 2, torch.float32)
    there = [x.detach().to(device).requires_grad_() for x in given]
    pairs, others = (list(zip(xs[3::2], xs[4::2], strict=True)) for xs in (given, there))
    want = reference(*given[:3], see_RN, pairs)
    got = attend_ranges(*there[:3], Ranges(first_R.to(device), stop_R.to(device), N), others)
    found, slopes = (torch.autograd.grad(x.square().sum(), xs) for x, xs in ((got, there), (want, given)))
    for a, b in zip((got, *found), (want, *slopes), strict=True):
        assert float((a.detach().cpu() - b.detach()).abs().max() / b.detach().abs().max()) < 5e-3


def test_the_block_mask_is_that_of_the_ranges() -> None:
    """Blocks that it passes over hold no pair, blocks that it takes whole hold nothing else."""
    for case in CASES.values():
        if not case:
            continue
        first_R, stop_R, see_RN = bounds(case)
        block = Ranges(first_R, stop_R, N, flex=True).block
        dense_MK = torch.zeros(-(-len(case) // 128), -(-N // 128), dtype=torch.long)
        for counts, indices, mark in (
            (block.kv_num_blocks, block.kv_indices, 1), (block.full_kv_num_blocks, block.full_kv_indices, 2)
        ):  # fmt: skip
            for m, count in enumerate(counts[0, 0].tolist()):
                dense_MK[m, indices[0, 0, m, :count].long()] += mark
        for m in range(len(dense_MK)):
            for j in range(dense_MK.shape[1]):
                part = see_RN[m * 128 : (m + 1) * 128, j * 128 : (j + 1) * 128]
                assert int(dense_MK[m, j]) in ((0, 1, 2) if not part.any() else (1, 2))
                if dense_MK[m, j] == 0:
                    assert not part.any()
                if dense_MK[m, j] == 2:
                    assert part.all() and part.shape == (128, 128)


def test_no_tensor_holds_all_pairs() -> None:
    """Forward and backward over 4,096 rows of one document and own keys: the largest tensor is an input's, or a tile's
    scores of a fixed size."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for x in made if isinstance(made, tuple | list) else (made,):
                if isinstance(x, Tensor):
                    largest = max(largest, x.untyped_storage().size())
            return made

    for step in (1, 3):  # whole, and with gaps
        rows = torch.arange(0, 4096, step)
        given = inputs(len(rows), 4, 2, 1, torch.float32, keys=4096)
        with Watch():
            attend_ranges(*given[:3], Ranges(0 * rows, rows + 1, 4096), [(given[3], given[4])]).sum().backward()
    assert largest <= max(4096 * 4 * 8 * 4, 4 * attention.TILE * (attention.WIDEST + attention.TILE) * 4)
