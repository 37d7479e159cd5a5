"""The best draft tree of a given size, from measured chances of acceptance: the dynamic programme of Sequoia.

Sequoia (arXiv 2402.12374, section 3.1) assumes that acceptance is *positional*: the chance that the r-th child of a node
is the one that is kept, given that the node is, depends on r and not on the tokens. The expected number of kept tokens is
then the sum over the nodes of the product of the chances along their paths. Here the chance may depend on the depth as
well (chances[d][r], depth d + 1), because drafts get worse with depth.

Let best[t][r][n] be the most that n nodes can bring below a node at depth t, as children of ranks r, r + 1, ... and what
hangs on them. The child of rank r takes m nodes, itself included, or ends the row of siblings:

    best[t][r][n] = max(0, max over m of chances[t][r] * (1 + best[t + 1][0][m - 1]) + best[t][r + 1][n - m])

A child needs its preceding siblings (templates of `tree=static` ask for that), so where chances fall with the rank this is
the tree of the n likeliest paths (`marginals.likeliest_paths`); measured ones need not fall. Ours besides: chances by
depth, and the search for tokens per *second*, which inference/choose.py does over all sizes and depths that come from here.

Tests: tests/test_choose.py (against all ordered trees, and closed forms).
"""

from __future__ import annotations

from collections.abc import Sequence

from .marginals import Choices, chances_at

Chances = Sequence[Sequence[float]]


def best_trees(chances: Chances, nodes: int, depth: int) -> list[tuple[float, Choices]]:
    """Per size n = 0 .. `nodes`: the most kept tokens that a tree of at most n nodes and `depth` levels can expect, and
    such a tree (paths by length and rank; fewer nodes where more would bring nothing).

    `chances[d][r]`: that the child of rank r at depth d + 1 is kept, given that its parent is; the ranks of a row sum to 1
    at most, and depths beyond the last row are like it. Time O(depth * ranks * nodes^2).

    Raises:
        ValueError: no chances, or one outside [0, 1].
    """
    if not chances or not all(chances) or any(not 0 <= c <= 1 for row in chances for c in row):
        raise ValueError(f"chances={chances}: give per depth at least one chance in [0, 1]")
    rows = [chances_at(chances, t + 1, nodes) for t in range(depth)]
    nothing = [0.0] * (nodes + 1)
    below = nothing  # best[t + 1][0]
    taken: list[list[list[int]]] = [[] for _ in rows]  # [t][r][n]: nodes of the child of rank r, 0 = it isn't there
    for t in reversed(range(depth)):
        later = nothing  # best[t][r + 1]
        for chance in reversed(rows[t]):
            values, sizes = [0.0], [0]
            for n in range(1, nodes + 1):
                best, size = 0.0, 0
                for m in range(1, n + 1):
                    if (value := chance * (1.0 + below[m - 1]) + later[n - m]) > best:
                        best, size = value, m
                values.append(best)
                sizes.append(size)
            later = values
            taken[t].append(sizes)
        taken[t].reverse()
        below = later
    return [(below[n], _paths(taken, n)) for n in range(nodes + 1)]


def _paths(taken: list[list[list[int]]], nodes: int) -> Choices:
    """The tree that the sizes describe."""
    paths: list[tuple[int, ...]] = []
    todo: list[tuple[tuple[int, ...], int]] = [((), nodes)]
    while todo:
        above, left = todo.pop()
        if len(above) == len(taken):
            continue
        for rank, sizes in enumerate(taken[len(above)]):
            if (size := sizes[left]) == 0:
                break
            paths.append((*above, rank))
            todo.append((paths[-1], size - 1))
            left -= size
    return tuple(sorted(paths, key=lambda path: (len(path), path)))
