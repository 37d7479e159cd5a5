"""The canvas of a batch of requests: what is decided, which blocks are open, and what a pass has to run and to see.

Places are positions in a row's text, from 0. In every row, in order: *settled* places, whose keys and values are final;
finished blocks that no pass has written yet (`settled_B` to `start_B`); open blocks (`start_B` to `stop_B`, the first one
unfinished); what is not opened yet, up to `ends_B` = prompt + budget. `block_BS` numbers the blocks of every place.

Part of inference/diffuse.py. Test: pytest tests/test_diffuse.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.denoiser import Denoiser
from .commit import Request
from .step import Step
from .strategies import Edit

_FAR = 1 << 40  # beyond every place


@dataclass
class Window:
    """What a pass runs: T places per row, finished ones first, then those whose keys and values are kept for later
    passes of the block, then the others, each in order; padding behind, which nobody sees."""

    places_BT: Tensor
    use_BT: Tensor  # bool, not padding
    see_BTT: Tensor
    rows_BS: Tensor  # int64, at which of the T a place is run, -1 = it is not
    runs_B: Tensor  # bool, this row takes part in the pass
    kv_B: Tensor  # bool, this row's pass only writes finished places
    kept_B: Tensor  # bool, finished places are written
    lengths_B: Tensor  # slots that the cache is cut to before the pass
    stay_B: Tensor  # rows of the pass that it keeps

    @property
    def positions_BT(self) -> Tensor:
        return self.places_BT * self.use_BT

    def row_of(self, place_BX: Tensor) -> Tensor:
        """int64: at which of the T a place is run; -1 = it is not."""
        return torch.where(place_BX >= 0, self.rows_BS.gather(1, place_BX.clamp(min=0)), -1)


class Canvas:
    """The canvas of B requests; S = places of the longest, with room for `width` columns behind."""

    def __init__(self, denoiser: Denoiser, requests: list[Request], decode: Any) -> None:
        self.denoiser, self.decode, self.strategy = denoiser, decode, decode.strategy
        device, b = denoiser.device, len(requests)
        self.width = decode.block * self.strategy.blocks
        longest = max(len(r.prompt) + r.params.max_new_tokens for r in requests)
        s = longest + self.width
        self.cache_slots = longest + 2 * self.width + 2 if denoiser.causal else 2 * longest
        self.partial = decode.approximate_cache
        self.place_S = torch.arange(s, device=device)
        self.prompt_B = torch.tensor([len(r.prompt) for r in requests], device=device)
        self.ends_B = torch.tensor([len(r.prompt) + r.params.max_new_tokens for r in requests], device=device)
        self.ids_BS = torch.full((b, s), denoiser.mask_id, device=device)
        for row, request in enumerate(requests):
            self.ids_BS[row, : len(request.prompt)] = torch.tensor(request.prompt, device=device)
        self.answer_BS = (self.place_S >= self.prompt_B[:, None]) & (self.place_S < self.ends_B[:, None])
        self.masked_BS = self.answer_BS.clone()
        self.stops_BV = torch.zeros(b, denoiser.facts.vocab, dtype=torch.bool, device=device)
        for row, request in enumerate(requests):
            self.stops_BV[row, sorted(request.eos_ids | request.stop_ids)] = True
        self.when_BS = torch.full_like(self.ids_BS, -1)  # the denoising pass that decided the place
        self.now_B = torch.zeros_like(self.prompt_B)
        self.soft_BS = torch.zeros(b, s, dtype=torch.float64, device=device)
        self.soft_ids_BS = self.ids_BS.clone()
        if denoiser.origin == "document":
            self.number_B = self.prompt_B // decode.block
            self.start_B = self.number_B * decode.block
            blocks_BS = (self.place_S // decode.block).expand(b, s)
        else:  # the prompt is one block
            self.number_B = torch.ones_like(self.prompt_B)
            self.start_B = self.prompt_B.clone()
            blocks_BS = torch.zeros_like(self.ids_BS)
        self.block_BS = torch.where(self.place_S < self.start_B[:, None], blocks_BS, _FAR)
        self.stop_B = self.start_B.clone()
        zeros_B = torch.zeros_like(self.start_B)
        self.settled_B, self.passes_B, self.full_passes_B = zeros_B, zeros_B.clone(), zeros_B.clone()
        self.zone_end_B, self.zone_B, self.age_B = zeros_B.clone(), zeros_B - 1, zeros_B.clone()
        no_B = zeros_B.bool()
        self.begun_B, self.full_B, self.changed_B, self.more_B = no_B, no_B.clone(), no_B.clone(), no_B.clone()
        self._open(~no_B)

    # What is where

    def places(self) -> Tensor:
        """int64 [B, C]: the places of the columns that strategies see."""
        return self.start_B[:, None] + self.place_S[: self.width]

    def decided(self) -> Tensor:
        """bool [B, S]: decided places of the answer."""
        return self.answer_BS & ~self.masked_BS

    def tokens(self) -> Tensor:
        """int64 [B, S]: what stands there, for places that are decided; a mask may lie behind the vocabulary."""
        return self.ids_BS.clamp(max=self.denoiser.facts.vocab - 1)

    def _undecided(self) -> Tensor:
        """bool [B, S]: places of open blocks that are still to be decided: not those behind a decided end."""
        ended_BS = self.decided() & self.stops_BV.gather(1, self.tokens())
        end_B1 = torch.where(ended_BS, self.place_S, _FAR).amin(1, keepdim=True)
        open_BS = (self.place_S >= self.start_B[:, None]) & (self.place_S < self.stop_B[:, None])
        return self.masked_BS & open_BS & (self.place_S < end_B1)

    def undecided(self, place_BC: Tensor) -> Tensor:
        """bool [B, C]: the same for some places."""
        return self._undecided().gather(1, place_BC)

    def unfinished(self) -> Tensor:
        """bool [B]: the first block has undecided places."""
        return (self._undecided() & self._first()).any(1)

    def _first(self) -> Tensor:
        """bool [B, S]: places of the first unfinished block."""
        number_B1 = self.block_BS.gather(1, self.start_B[:, None])
        return (self.block_BS == number_B1) & (self.place_S >= self.start_B[:, None]) & (number_B1 < _FAR)

    def look(
        self,
        said_BC: Tensor,
        logits_BCV: Tensor,
        best_BC: Tensor,
        confidence_BC: Tensor,
        ends_BC: Tensor,
        memory: dict[str, Tensor],
    ) -> Step:
        """What a strategy sees; `said_BC`: places that the pass says something about."""
        place_BC = self.places()
        inside_BC = place_BC < self.stop_B[:, None]
        open_BC = self.undecided(place_BC) & said_BC & (place_BC < self.zone_end_B[:, None])
        number_BC = self.block_BS.gather(1, place_BC) - self.block_BS.gather(1, self.start_B[:, None])
        # A block's first token that was free can be decided only once: its row is not run again.
        free_BC = (place_BC == self.start_B[:, None]) & (self.denoiser.shift and self.denoiser.causal)
        return Step(
            open_BC=open_BC,
            first_BC=self._first().gather(1, place_BC),
            block_BC=torch.where(inside_BC, number_BC, -1),
            fixed_BC=~self.decided().gather(1, place_BC) | ~said_BC | ~inside_BC | free_BC,
            ids_BC=self.ids_BS.gather(1, place_BC),
            best_BC=best_BC,
            confidence_BC=confidence_BC,
            logits_BCV=logits_BCV,
            ends_BC=ends_BC,
            passes_B=self.passes_B,
            left_B=self.masked_BS.sum(1),
            total_B=self.ends_B - self.prompt_B,
            memory=memory,
        )

    # What changes

    def put(self, place_BX: Tensor, ids_BX: Tensor, where_BX: Tensor) -> None:
        """Decide places."""
        when_BX = torch.where(where_BX, self.now_B[:, None], self.when_BS.gather(1, place_BX))
        self.when_BS.scatter_(1, place_BX, when_BX)
        ids_BX = torch.where(where_BX, ids_BX, self.ids_BS.gather(1, place_BX))
        self.ids_BS.scatter_(1, place_BX, ids_BX)
        self.masked_BS.scatter_(1, place_BX, self.masked_BS.gather(1, place_BX) & ~where_BX)

    def take_back(self, place_BC: Tensor, where_BC: Tensor) -> None:
        """Mask places again."""
        self.put(place_BC, torch.full_like(place_BC, self.denoiser.mask_id), where_BC)
        self.masked_BS.scatter_(1, place_BC, self.masked_BS.gather(1, place_BC) | where_BC)

    def soften(self, place_BC: Tensor, ids_BC: Tensor, weight_BC: Tensor) -> None:
        """Read places as a mix of these tokens and the mask; weight 0 = as the mask."""
        self.soft_BS.scatter_(1, place_BC, weight_BC.double())
        self.soft_ids_BS.scatter_(1, place_BC, ids_BC)

    def cut(self, length_B: Tensor) -> None:
        """Shorten the open block to `length_B` places where that is positive and less than it has."""
        stop_B = self.start_B + length_B
        shorter_B = (length_B > 0) & (stop_B < self.stop_B)
        self.stop_B = torch.where(shorter_B, stop_B, self.stop_B)
        self.block_BS = torch.where(self.place_S < self.stop_B[:, None], self.block_BS, _FAR)

    def passed(self, working_B: Tensor, full_B: Tensor, changed_B: Tensor, more_B: Tensor) -> None:
        """Note how a pass went: `full_B`: nothing was undecided before it; `changed_B`: tokens were edited; `more_B`:
        another block is to be opened."""
        self.passes_B = self.passes_B + working_B
        self.full_passes_B = self.full_passes_B + (working_B & full_B)
        self.full_B = torch.where(working_B, full_B, self.full_B)
        self.changed_B = torch.where(working_B, changed_B, self.changed_B)
        self.more_B = more_B

    def wrote(self, window: Window) -> Tensor:
        """A pass has run its window. bool [B]: rows whose first open place is free now, said by the last finished row."""
        self.begun_B = self.begun_B | window.runs_B
        self.now_B = self.now_B + (window.runs_B & ~window.kv_B)
        self.settled_B = torch.where(window.kept_B, self.start_B, self.settled_B)
        masked_B = self.masked_BS.gather(1, self.start_B[:, None])[:, 0]
        return window.kept_B & masked_B & self.denoiser.shift

    def advance(self, live_B: Tensor) -> Tensor:
        """Close blocks that are finished, open the next ones. int64 [B]: places that the first column moved by."""
        old_B, apply = self.start_B, self.strategy.apply
        for _ in range(self.strategy.blocks):
            done_B = live_B & ~self.unfinished() & (self.start_B < self.stop_B)
            if isinstance(apply, Edit):  # a full block stays open until a pass leaves it as it is
                done_B &= (self.full_B & ~self.changed_B) | (self.full_passes_B >= apply.post_edits)
            self.start_B = torch.where(done_B, self.start_B + self._first().sum(1), self.start_B)
            self.passes_B, self.full_passes_B = self.passes_B * ~done_B, self.full_passes_B * ~done_B
            self.full_B = self.full_B & ~done_B
        empty_B = self.start_B == self.stop_B
        self._open(live_B & (empty_B | self.more_B) & (self.stop_B < self.ends_B))
        self.more_B = torch.zeros_like(self.more_B)
        return self.start_B - old_B

    def _open(self, rows_B: Tensor) -> None:
        """Open one more block."""
        stop_B = torch.where(rows_B, torch.minimum(self.stop_B + self.decode.block, self.ends_B), self.stop_B)
        new_BS = (self.place_S >= self.stop_B[:, None]) & (self.place_S < stop_B[:, None])
        self.block_BS = torch.where(new_BS, self.number_B[:, None], self.block_BS)
        self.number_B, self.stop_B = self.number_B + rows_B, stop_B

    def final_B(self, revised: bool) -> Tensor:
        """int64 [B]: places before this one will not change; `revised`: decided tokens of open blocks may."""
        masked_BS = self.masked_BS & (self.place_S < self.ends_B[:, None])
        if revised:
            return self.start_B
        return torch.where(masked_BS, self.place_S, self.ends_B[:, None]).amin(1)

    # What a pass runs and sees

    def window(self, live_B: Tensor) -> Window:
        """The window of a pass; a row that is not live runs nothing. Two views do not go into one pass: in `dual`, rows
        with something to write go first, alone."""
        d, decode, p_S = self.denoiser, self.decode, self.place_S
        start_B1, stop_B1, settled_B1 = self.start_B[:, None], self.stop_B[:, None], self.settled_B[:, None]
        kv_B = torch.zeros_like(live_B)
        if d.causal:
            undecided_BS = self._undecided()
            if d.shift:  # but for the token that finished places give free
                undecided_BS &= p_S != start_B1
            alone_B = ~self.begun_B | ~undecided_BS.any(1) | (not decode.fuse)
            kv_B = live_B & (self.settled_B < self.start_B) & (alone_B | d.dual)
            if d.dual and bool(kv_B.any()):
                live_B = kv_B
        zone_B, self.zone_end_B = self._zone()
        begin_B1, end_B1 = zone_B[:, None] - int(d.shift), self.zone_end_B[:, None]
        keep_BS = (p_S >= settled_B1) & (p_S < start_B1) & d.causal
        if d.causal:
            low_B1 = settled_B1 if decode.cache != "none" else torch.zeros_like(settled_B1)
            # In `dual` the last row of a whole block would speak of the next one; of a block that the budget cuts it is
            # as any other.
            idle_B1 = ((stop_B1 - start_B1) % decode.block == 0) & d.dual
            all_BS = (p_S >= low_B1) & (p_S < torch.where(kv_B[:, None], start_B1, stop_B1 - idle_B1.long()))
            begin_B1 = torch.maximum(begin_B1, start_B1)
        else:
            seen_B1 = self.ends_B[:, None]
            if decode.window is not None:
                seen_B1 = torch.minimum(seen_B1, stop_B1 + decode.window)
            all_BS = p_S < seen_B1
            end_B1 = seen_B1 if decode.cache == "prefix" else end_B1
        run_BS, hold_BS = all_BS & live_B[:, None], torch.zeros_like(keep_BS)
        lengths_B = torch.full_like(self.start_B, _FAR)
        if self.partial:
            zone_BS = (p_S >= begin_B1) & (p_S < end_B1)
            fresh_B = live_B & self._stale(zone_B, kv_B)
            hold_BS = run_BS & ~keep_BS & ~zone_BS & (fresh_B & ~kv_B)[:, None]
            run_BS = run_BS & (zone_BS | fresh_B[:, None])
            lengths_B = torch.where(fresh_B, self.settled_B, lengths_B)
        keep_BS &= run_BS
        kinds_BS = torch.where(keep_BS, 0, torch.where(hold_BS, 1, torch.where(run_BS, 2, 3)))
        t = int(run_BS.sum(1).max())
        places_BT = kinds_BS.sort(dim=1, stable=True).indices[:, :t]
        use_BT = run_BS.gather(1, places_BT)
        rows_BS = torch.full_like(self.ids_BS, -1)
        rows_BS.scatter_(1, places_BT, torch.where(use_BT, torch.arange(t, device=p_S.device), -1))
        see_BTT = self._sight(places_BT, use_BT)
        kept_B, stay_B = keep_BS.any(1), keep_BS.sum(1) + hold_BS.sum(1)
        return Window(places_BT, use_BT, see_BTT, rows_BS, live_B, kv_B, kept_B, lengths_B, stay_B)

    def _zone(self) -> tuple[Tensor, Tensor]:
        """int64 [B] twice: first place and end of what is decided now, the open blocks or a sub-block."""
        sub = self.decode.sub_block
        if sub is None:
            return self.start_B, self.stop_B
        first_B = torch.where(self._undecided(), self.place_S, _FAR).amin(1)
        first_B = torch.where(first_B < _FAR, first_B, self.start_B)
        zone_B = self.start_B + (first_B - self.start_B) // sub * sub
        return zone_B, torch.minimum(zone_B + sub, self.stop_B)

    def _stale(self, zone_B: Tensor, kv_B: Tensor) -> Tensor:
        """bool [B]: an approximate cache has to be written anew."""
        zone_B = zone_B * (len(self.place_S) + 1) + self.zone_end_B
        stale_B = kv_B | (zone_B != self.zone_B)
        if self.decode.refresh is not None:
            stale_B = stale_B | (self.age_B >= self.decode.refresh)
        self.age_B = torch.where(stale_B, 1, self.age_B + 1)
        self.zone_B = torch.where(kv_B, -1, zone_B)
        return stale_B

    def _sight(self, places_BT: Tensor, use_BT: Tensor) -> Tensor:
        block_BT, masked_BT = self.block_BS.gather(1, places_BT), self.masked_BS.gather(1, places_BT)
        return sight(self.denoiser, places_BT, use_BT, block_BT, places_BT < self.start_B[:, None], masked_BT)


def sight(
    denoiser: Denoiser,
    places_BT: Tensor,
    use_BT: Tensor,
    block_BT: Tensor,
    closed_BT: Tensor,
    masked_BT: Tensor,
    token_causal: bool = False,
) -> Tensor:
    """bool [B, T, T]: what each row of a pass sees of the others, by the model's own rule. `use_BT` False: padding, seen
    by itself alone; `block_BT`: number of the row's block; `closed_BT`: that block is finished; `masked_BT`: undecided;
    `token_causal`: finished tokens see those before them whatever the model was trained with."""
    t = places_BT.shape[1]
    self_TT = torch.eye(t, dtype=torch.bool, device=places_BT.device)
    used_BTT = use_BT[:, None, :] & use_BT[:, :, None]
    if not denoiser.causal:
        return used_BTT | self_TT
    order_BT = torch.zeros_like(places_BT)  # of equals, each sees the other
    if denoiser.token_causal or token_causal:
        order_BT = places_BT * closed_BT
    if denoiser.inside != "full":
        behind_BT = masked_BT * _FAR if denoiser.inside == "observed_first" else 0
        order_BT = torch.where(closed_BT, order_BT, places_BT + behind_BT)
    earlier_BTT = block_BT[:, None, :] < block_BT[:, :, None]
    same_BTT = block_BT[:, None, :] == block_BT[:, :, None]
    within_BTT = same_BTT & (order_BT[:, None, :] <= order_BT[:, :, None])
    return ((earlier_BTT | within_BTT) & used_BTT) | self_TT
