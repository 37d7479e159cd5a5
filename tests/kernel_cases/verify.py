"""Cases of kernels/verify.py for kernel_proof.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace

import torch
from kernel_proof import Case
from torch import Tensor

from draftsmith.kernels.verify import RULES, Candidates, Choice, Coins, columns, reference, verify


def flat(choice: Choice) -> tuple[Tensor, ...]:
    return tuple(x.long() for x in astuple(choice))


def coins_of(b: int, n: int) -> Coins:
    u = torch.rand(3, b, n + 1, dtype=torch.float64)
    return Coins(u[0, :, 1:], u[1], u[2])


def likely(logits_BMV: Tensor, parents_BN: Tensor) -> Tensor:
    """[B, N] a token for each node that its parent's row makes likely."""
    b, n = parents_BN.shape
    p_BNV = (2 * logits_BMV[torch.arange(b)[:, None], parents_BN].float()).softmax(-1)
    return torch.multinomial(p_BNV.flatten(0, 1), 1).view(b, n) if n else parents_BN


def tree_of(b: int, n: int, v: int, dtype: torch.dtype, chain: bool = False) -> tuple[Tensor, Tensor, Candidates]:
    """(logits, temperatures, candidates): equal logits, some -inf, cold rows, unused nodes, repeated siblings."""
    logits_BMV = (2 * torch.randn(b, n + 1, v)).round().to(dtype)
    logits_BMV[torch.rand(b, n + 1, v) < 0.1] = -torch.inf
    temperature_B = torch.tensor([0, 0.7, 1, 1.3]).repeat(b)[:b]
    parents_BN = torch.arange(n).repeat(b, 1)
    if not chain:
        parents_BN = torch.minimum(parents_BN, (torch.rand(b, n) ** 2 * (parents_BN + 1)).long())
    valid_BN = torch.rand(b, n) < 0.9
    for j in range(n):
        on_top_B = torch.cat([torch.ones(b, 1, dtype=torch.bool), valid_BN], 1)[torch.arange(b), parents_BN[:, j]]
        valid_BN[:, j] &= on_top_B
    return logits_BMV, temperature_B, Candidates(likely(logits_BMV, parents_BN), parents_BN, valid_BN, n)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Ids: nothing may differ. No uniform here lies within fp32's rounding of a border, but for those put upon one."""
    torch.manual_seed(0)

    def compared(name: str, rule: str, logits: Tensor, heat: Tensor, candidates: Candidates) -> Case:
        coins = coins_of(*candidates.tokens_BN.shape)
        return Case(
            f"{rule}: {name}",
            lambda: flat(verify(rule, logits, heat, candidates, coins)),
            lambda: flat(reference(rule, logits, heat, candidates, coins)),
            0,
        )

    for rule in ("target_only", "sample_match"):
        yield compared("7 nodes", rule, *tree_of(12, 7, 41, dtype))
        yield compared("an anchor alone", rule, *tree_of(4, 0, 5, dtype))
        yield compared("64 nodes", rule, *tree_of(2, 64, 11, dtype))
    yield compared("a vocabulary of five blocks, float64", "target_only", *tree_of(4, 5, 5000, torch.float64))
    logits_BMV, heat_B, tree = tree_of(5, 6, 33, dtype)
    yield compared("no deeper than 1", "target_only", logits_BMV, heat_B, replace(tree, depth=1))
    wide = torch.randn(4, 9, 46).to(dtype)[:, ::2, 3:36]
    yield compared("strides", "target_only", wide, heat_B[:4], tree_of(4, 4, 33, dtype)[2])
    for mapped in (False, True):
        yield ratio_case(dtype, mapped)
    yield borders(dtype)
    yield repeats(dtype)


def ratio_case(dtype: torch.dtype, mapped: bool) -> Case:
    """A chain from rows that resemble the target's; half of the ids are the drafter's where mapped, some rows fixed."""
    b, n, v = 12, 4, 40
    logits_BMV, heat_B, chain = tree_of(b, n, v, dtype, chain=True)
    d2t_W = torch.arange(0, v, 2) if mapped else torch.arange(v)
    q_BMW = (logits_BMV.float()[..., d2t_W].clamp(min=-9) + torch.randn(b, n + 1, len(d2t_W))).softmax(-1)
    tokens_BN = d2t_W[torch.multinomial(q_BMW[:, :n].flatten(0, 1), 1).view(b, n)]
    drawn = replace(chain, tokens_BN=tokens_BN, q_BMW=q_BMW)
    if mapped:
        drawn = replace(drawn, columns_V=columns(d2t_W, v), sampled_B=torch.rand(b) < 0.7)
    coins = coins_of(b, n)
    return Case(
        f"ratio: {'mapped, some rows fixed' if mapped else 'the same ids'}",
        lambda: flat(verify("ratio", logits_BMV, heat_B, drawn, coins)),
        lambda: flat(reference("ratio", logits_BMV, heat_B, drawn, coins)),
        0,
    )


def borders(dtype: torch.dtype) -> Case:
    """Four equal logits, a fifth of -inf; the child is token 1, or token 4 of probability 0 in the last row."""
    logits_BMV = torch.zeros(5, 2, 5).to(dtype)
    logits_BMV[..., 4] = -torch.inf
    token_BN = torch.tensor([[1], [1], [1], [1], [4]])
    child = Candidates(token_BN, torch.zeros(5, 1).long(), torch.ones(5, 1).bool(), 1)
    below = 0.25 - 2.0**-52  # the largest uniform below a quarter
    u_B = torch.tensor([0.25, below, below, 0.25, 0.0], dtype=torch.float64)[:, None]
    residual_BM = torch.tensor([0.0, 0, 0, 1 - 2.0**-52, 0.5], dtype=torch.float64)[:, None].repeat(1, 2)
    target_BM = torch.tensor([0.9, 0.5, 1 - 2.0**-52, 0.9, 0.9], dtype=torch.float64)[:, None].repeat(1, 2)
    coins = Coins(u_B, residual_BM, target_BM)
    path, counts, token, tested = [[0], [1], [1], [0], [0]], [0, 1, 1, 0, 0], [0, 2, 3, 3, 2], [1, 0, 0, 1, 1]
    return Case(
        "target_only: uniforms on borders",
        lambda: flat(verify("target_only", logits_BMV, torch.ones(5), child, coins)),
        lambda: tuple(torch.tensor(x) for x in (path, counts, counts, token, tested)),
        0,
    )


def repeats(dtype: torch.dtype) -> Case:
    """Two tokens of one half each: the first child is rejected, its double is void, then the other one is certain."""
    logits_BMV = torch.zeros(3, 4, 2).to(dtype)
    tree = Candidates(
        torch.tensor([[0, 0, 1]] * 3),
        torch.zeros(3, 3).long(),
        torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool(),
        1,
    )
    none_BM = torch.zeros(3, 4, dtype=torch.float64)
    coins = Coins(torch.tensor([[0.5, 0, 1 - 2.0**-52]] * 3, dtype=torch.float64), none_BM, none_BM)
    want = ([[3], [0], [0]], [1, 0, 0], [3, 0, 0], [0, 1, 0], [0, 1, 0])
    return Case(
        "target_only: repeats and unused nodes",
        lambda: flat(verify(RULES[0], logits_BMV, torch.ones(3), tree, coins)),
        lambda: tuple(torch.tensor(x) for x in want),
        0,
    )
