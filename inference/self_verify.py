"""Self-verification: a block model's own mode of block size 1 verifies what it drafts by the block (S2D2).

In that mode every token is a block: it sees the tokens before it, and the next one is what the model says of one mask
behind them (without shift), or of the last token (with shift). A round drafts the rest of the open block in one pass,
then runs the draft in that mode, in one pass, and keeps it as far as the mode says the same, and the token that the mode
says next. So the answer is that of the mode itself, `diffuse` with blocks of one token, greedy or sampled: lossless
against that mode, not against decoding by blocks. Finished text is kept as the mode reads it.

With `route`, drafts whose least sure token reaches it are taken unverified: faster, and no longer lossless.

Test: pytest tests/test_self_verify.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..losses.probs import History, ParamRows
from ..models.denoiser import Denoiser
from .branches import SelfVerify
from .canvas import sight
from .commit import Event, Passes, Request
from .step import candidates, too_early


class SelfVerifying:
    """Requests that are decoded together. Places are positions in a row's text; `known_B` of them are decided, and all of
    these but the newest stand in the cache."""

    def __init__(self, denoiser: Denoiser, requests: list[Request], verify: SelfVerify) -> None:
        if not denoiser.causal or denoiser.dual:
            raise ValueError(
                "s2d2: needs a model with blocks, one set of weights for both modes; "
                + ("in dual use self-drafting" if denoiser.dual else "this one sees the whole canvas")
            )
        self.denoiser, self.requests, self.verify, self.device = denoiser, requests, verify, denoiser.device
        self.params = ParamRows.pack([r.params for r in requests], self.device)
        if self.params.penalises:
            raise ValueError("s2d2: penalties depend on drafted tokens and are not supported; set them to 1 and 0")
        rows, block = len(requests), denoiser.block
        slots = max(len(r.prompt) + r.params.max_new_tokens for r in requests) + 4 * block + 4
        self.ids_BS = torch.full((rows, slots), denoiser.mask_id, device=self.device)
        for row, request in enumerate(requests):
            self.ids_BS[row, : len(request.prompt)] = torch.tensor(request.prompt, device=self.device)
        self.prompt_B = torch.tensor([len(r.prompt) for r in requests], device=self.device)
        self.known_B = self.prompt_B.clone()
        self.seeds_B = torch.tensor([r.seed for r in requests], device=self.device)
        self.least_B1 = torch.tensor([[r.params.min_new_tokens] for r in requests], device=self.device)
        self.stops_BV = torch.zeros(rows, denoiser.facts.vocab, dtype=torch.bool, device=self.device)
        for row, request in enumerate(requests):
            self.stops_BV[row, sorted(request.eos_ids | request.stop_ids)] = True
        self.cache = denoiser.new_cache(rows, slots)
        self.passes = [Passes() for _ in requests]
        self.rounds: list[list[int]] = [[] for _ in requests]
        self.begun = False

    @torch.no_grad()
    def step(self) -> list[Event]:
        """A draft and its verification for every request that is not done; at first, the prompts."""
        live_B = torch.tensor([r.stop_reason is None for r in self.requests], device=self.device)
        if not self.begun:
            self._prefill()
        token_BK, confidence_BK, size_B = self._draft(live_B)
        taken_B = torch.zeros_like(live_B)
        if self.verify.route is not None:
            k_K = torch.arange(token_BK.shape[1], device=self.device)
            unsure_BK = (confidence_BK < self.verify.route) & (k_K < size_B[:, None])
            taken_B = live_B & ~unsure_BK.any(1)
        target_BM, count_B = token_BK, size_B
        if bool((live_B & ~taken_B).any()):
            target_BM, count_B = self._verify(token_BK, size_B, live_B & ~taken_B)
        return self._commit(token_BK, size_B, target_BM, count_B, taken_B, live_B)

    def orders(self) -> list[list[int]]:
        """Per request and answered token, the draft pass of its round."""
        return [rounds[: len(r.ids)] for rounds, r in zip(self.rounds, self.requests, strict=True)]

    def _prefill(self) -> None:
        """All of the prompt but its last token."""
        self.begun = True
        count_B = self.prompt_B - 1
        if int(count_B.max()):
            places_BT = torch.arange(int(count_B.max()), device=self.device).expand(len(count_B), -1)
            use_BT = places_BT < count_B[:, None]
            self._run(self.ids_BS.gather(1, places_BT), places_BT, use_BT, use_BT)
            self.cache.commit(count_B)
            self._count("prefill", count_B > 0)

    def _run(self, ids_BT: Tensor, places_BT: Tensor, use_BT: Tensor, closed_BT: Tensor) -> Tensor:
        """Finished tokens, as the mode reads them, before one open block: last hidden states."""
        see_BTT = sight(
            self.denoiser, places_BT, use_BT, (~closed_BT).long(), closed_BT, ids_BT == self.denoiser.mask_id, True
        )
        return self._forward(ids_BT, places_BT, use_BT, see_BTT)

    def _forward(self, ids_BT: Tensor, places_BT: Tensor, use_BT: Tensor, see_BTT: Tensor) -> Tensor:
        positions_BT = torch.where(use_BT, places_BT, 0).clamp(max=self.denoiser.facts.max_positions - 1)
        return self.denoiser.denoise(ids_BT, positions_BT, cache=self.cache, see_BTA=see_BTT)

    def _said(self, hidden_BXD: Tensor, place_BX: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates of places and their probabilities."""
        history = History(self.denoiser.facts.tokens)
        if bool((self.least_B1 > 0).any()):
            history.banned_RV = too_early(place_BX, self.prompt_B, self.least_B1, self.stops_BV)
        return candidates(self.denoiser, hidden_BXD, place_BX, self.params, self.seeds_B, history)[1:3]

    def _draft(self, live_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates [B, K] of the places behind what is known, K = block, their probabilities, and how many of them the
        open block has."""
        d, block = self.denoiser, self.denoiser.block
        origin_B = torch.zeros_like(self.known_B) if d.origin == "document" else self.prompt_B
        size_B = block - (self.known_B - origin_B) % block
        first_B = self.cache.lengths_B.clone()
        t = block + int(torch.where(live_B, self.known_B - first_B, 1).max())
        places_BT = first_B[:, None] + torch.arange(t, device=self.device)
        closed_BT = places_BT < self.known_B[:, None]
        use_BT = (places_BT < (self.known_B + size_B)[:, None]) & live_B[:, None]
        ids_BT = torch.where(closed_BT, self.ids_BS.gather(1, places_BT), d.mask_id)
        hidden_BTD = self._run(ids_BT, places_BT, use_BT, closed_BT)
        self.cache.commit(torch.where(live_B, self.known_B - first_B, 0))
        self._count("denoise", live_B)
        place_BK = self.known_B[:, None] + torch.arange(block, device=self.device)
        row_BK = (place_BK - int(d.shift) - first_B[:, None]).clamp(max=t - 1)
        rows_B1 = torch.arange(len(live_B), device=self.device)[:, None]
        token_BK, confidence_BK = self._said(hidden_BTD[rows_B1, row_BK], place_BK)
        return token_BK, confidence_BK, size_B

    def _verify(self, token_BK: Tensor, size_B: Tensor, live_B: Tensor) -> tuple[Tensor, Tensor]:
        """What the mode says, given the draft, of its places and the one behind it [B, K + 1]; and how many of the drafted
        tokens [B] are that. Those stay in the cache."""
        k = token_BK.shape[1]
        steps_K, steps_M = torch.arange(k, device=self.device), torch.arange(k + 1, device=self.device)
        place_BM = self.known_B[:, None] + steps_M
        drafted_BK = (steps_K < size_B[:, None]) & live_B[:, None]
        ids_BT, places_BT, use_BT = token_BK, place_BM[:, :k], drafted_BK
        see_BTT = (steps_K <= steps_K[:, None]) & drafted_BK[:, None, :]
        if not self.denoiser.shift:  # a mask per place, which sees the draft before it
            masks_BM = torch.full_like(place_BM, self.denoiser.mask_id)
            ids_BT, places_BT = torch.cat([ids_BT, masks_BM], 1), torch.cat([places_BT, place_BM], 1)
            use_BT = torch.cat([use_BT, (steps_M <= size_B[:, None]) & live_B[:, None]], 1)
            before_BMK = (steps_K < steps_M[:, None]) & drafted_BK[:, None, :]
            see_BTT = torch.nn.functional.pad(torch.cat([see_BTT, before_BMK], 1), (0, k + 1))
        see_BTT = (see_BTT & use_BT[:, :, None]) | torch.eye(ids_BT.shape[1], dtype=torch.bool, device=self.device)
        hidden_BTD = self._forward(ids_BT, places_BT, use_BT, see_BTT)
        if self.denoiser.shift:  # of the first place the draft's pass said it, by its last finished row
            target_BM = torch.cat([token_BK[:, :1], self._said(hidden_BTD, place_BM[:, 1:])[0]], 1)
        else:
            target_BM, _ = self._said(hidden_BTD[:, k:], place_BM)
        same_BK = (token_BK == target_BM[:, :k]) & drafted_BK
        count_B = same_BK.long().cumprod(1).sum(1)
        self.cache.commit(count_B)
        self._count("verify", live_B)
        return target_BM, count_B

    def _commit(
        self,
        token_BK: Tensor,
        size_B: Tensor,
        target_BM: Tensor,
        count_B: Tensor,
        taken_B: Tensor,
        live_B: Tensor,
    ) -> list[Event]:
        """Hand the tokens of a round to the requests, and note them."""
        events = []
        sizes, counts, taken, live = size_B.tolist(), count_B.tolist(), taken_B.tolist(), live_B.tolist()
        known, drafts, targets = self.known_B.tolist(), token_BK.tolist(), target_BM.tolist()
        for row, request in enumerate(self.requests):
            if not live[row]:
                continue
            kept = sizes[row] if taken[row] else counts[row]
            tokens = drafts[row][:kept] if taken[row] else [*drafts[row][:kept], targets[row][kept]]
            events.append(request.commit(tokens, kept))
            self.rounds[row] += [self.passes[row].denoise] * len(tokens)
            request.stats.rule = "s2d2" if self.verify.route is None else "s2d2, routed (lossy)"
            self.ids_BS[row, known[row] : known[row] + len(tokens)] = torch.tensor(tokens, device=self.device)
            known[row] += len(tokens)
        self.known_B = torch.tensor(known, device=self.device)
        return events

    def _count(self, kind: str, rows_B: Tensor) -> None:
        for row, runs in enumerate(rows_B.tolist()):
            if runs:
                setattr(self.passes[row], kind, getattr(self.passes[row], kind) + 1)
