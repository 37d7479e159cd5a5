"""What penalties, the minimal length and grammars need to know of the rows that are decoded together. Tests:
tests/test_sampling.py, tests/test_grammar.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..losses.probs import History, ParamRows
from .commit import Request


class Ledger:
    """What penalties, the minimal length and grammars need to know of a batch, its answers so far included; empty where no
    request uses them."""

    def __init__(
        self, requests: list[Request], params: ParamRows, vocab: int, tokens: int, device: torch.device
    ) -> None:
        self.tokens, self.vocab = tokens, vocab
        self.guided = [row for row, r in enumerate(requests) if r.params.grammar is not None]
        self.requests = requests
        self.ahead = False  # the device knows of more tokens than the requests do (inference/device_step.py)
        self.prompt_BV = self.counts_BV = self.stops_BV = None
        b = len(requests)
        if params.penalises:
            self.prompt_BV = torch.zeros(b, vocab, dtype=torch.bool, device=device)
            self.counts_BV = torch.zeros(b, vocab, dtype=torch.int64, device=device)
            for row, request in enumerate(requests):
                self.prompt_BV[row, torch.tensor(request.prompt, device=device)] = True
            for row, request in enumerate(requests):
                self.add(row, request.ids)
        self.made_B1 = torch.tensor([[len(r.ids)] for r in requests], device=device)
        self.shortest_B1 = torch.tensor([[r.params.min_new_tokens] for r in requests], device=device)
        if any(r.params.min_new_tokens for r in requests):
            self.stops_BV = torch.zeros(b, vocab, dtype=torch.bool, device=device)
            for row, request in enumerate(requests):
                self.stops_BV[row, sorted(request.eos_ids | request.stop_ids)] = True

    def add(self, row: int, ids: list[int]) -> None:
        """Count committed tokens."""
        if self.stops_BV is not None:
            self.made_B1[row] += len(ids)
        if self.counts_BV is not None:
            index = torch.tensor(ids, dtype=torch.int64, device=self.counts_BV.device)
            self.counts_BV[row].index_add_(0, index, torch.ones_like(index))

    def add_all(self, tokens_BA: Tensor, counts_B: Tensor) -> None:
        """Count the first `counts_B` of each row's tokens, without asking the device for anything."""
        self.made_B1 += counts_B[:, None]
        if self.counts_BV is not None:
            taken_BA = torch.arange(tokens_BA.shape[1], device=counts_B.device) < counts_B[:, None]
            self.counts_BV.scatter_add_(1, tokens_BA, taken_BA.long())

    def at(self, depths_BR: Tensor, tokens_BJ: Tensor | None = None, see_BRJ: Tensor | None = None) -> History:
        """History of B * R nodes: `depths_BR` drafted tokens lie before each, those of `tokens_BJ` that it sees."""
        b, r = depths_BR.shape
        prompt_XV = counts_XV = banned_XV = None
        if self.counts_BV is not None and self.prompt_BV is not None:
            counts_BRV = self.counts_BV[:, None].repeat(1, r, 1)
            if tokens_BJ is not None and see_BRJ is not None:
                counts_BRV.scatter_add_(2, tokens_BJ[:, None].expand(b, r, -1), see_BRJ.long())
            counts_XV = counts_BRV.flatten(0, 1)
            prompt_XV = self.prompt_BV.repeat_interleave(r, 0)
        if self.stops_BV is not None and (
            self.ahead or any(len(q.ids) < q.params.min_new_tokens for q in self.requests)
        ):
            early_BR = self.made_B1 + depths_BR < self.shortest_B1
            banned_XV = (self.stops_BV[:, None] & early_BR[:, :, None]).flatten(0, 1)
        if self.guided:
            banned_XV = self._guide(depths_BR, tokens_BJ, see_BRJ, banned_XV)
        return History(self.tokens, prompt_XV, counts_XV, banned_XV)

    def _guide(
        self, depths_BR: Tensor, tokens_BJ: Tensor | None, see_BRJ: Tensor | None, banned_XV: Tensor | None
    ) -> Tensor:
        """Ban what grammars forbid behind each node. Nodes whose path is not said, or breaks the grammar, stay as they are:
        of the former the drafter's rows alone are asked for, the latter are never reached."""
        b, r = depths_BR.shape
        if banned_XV is None:
            banned_XV = torch.zeros(b * r, self.vocab, dtype=torch.bool, device=depths_BR.device)
        for row in self.guided:
            guide, depths = self.requests[row].guide, depths_BR[row].tolist()
            if guide is None or self.requests[row].stop_reason is not None:
                continue
            paths: list[list[int]] = [[]] * r
            if tokens_BJ is not None and see_BRJ is not None:
                tokens = tokens_BJ[row].tolist()
                paths = [[t for t, seen in zip(tokens, line, strict=True) if seen] for line in see_BRJ[row].tolist()]
            for node, path in enumerate(paths):
                mask_V = guide.banned(path) if len(path) == depths[node] else None
                if mask_V is not None:
                    n = min(len(mask_V), self.vocab)
                    banned_XV[row * r + node, :n] |= mask_V[:n].to(banned_XV.device)
                    banned_XV[row * r + node, n:] = True
        return banned_XV
