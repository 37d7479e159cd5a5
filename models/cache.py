"""A preallocated key/value cache with a length per row: rolling back is setting a length.

Every row has its own number of committed slots. A forward pass appends its T new tokens right behind them (`begin`,
then one `update` per layer); nothing moves until the caller decides what stays: `commit` keeps a prefix of the
appended tail (chains), `compact` keeps a path through it (trees, DESIGN "Cache"), and what is not kept is overwritten
by the next pass. There is no padding to shuffle when rows accept different numbers of tokens.

What a query may see is always said by a mask (`mask`): committed slots, plus the tail tokens that the caller names.
Slots that no mask shows are still *read* by attention, with weight 0, as far as the longest row reaches; so they must
hold finite numbers (0 * NaN is NaN). They do: memory starts as zeros, `update` writes what the model computed, and rows
that `reset` or `arrange` frees are zeroed as far as they were written, so that one whose model said NaN leaves nothing to
the next. Slots beyond the longest row are not read.

A pass may show some of its tokens a *prefix* (`prefix_kv`): keys and values that belong to no token, one set per
layer, which stand behind the pass's own tokens and are gone with it, as everything uncommitted is.

Rows come and go by `arrange` (those in use are always the first ones, so a pass has no idle rows) and `adopt`.

`read_all` makes every pass read all slots instead. A query's attention then sums over the same number of keys whatever
the lengths of its own row and of the others, which bitwise equality between decoding loops needs (fixed width,
tests/bench/rows.py): attention over 100 keys and attention over 108 of which 8 are masked differ in low bits.

`reach` makes passes ask nothing of the device: how long rows are is then known to it alone, and every pass reads as many
slots as the host says. Decoding that runs ahead of the host does so (inference/device_step.py).

Test: pytest tests/test_cache.py tests/test_target.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache as HFCache

from ..kernels.compact import by_row, compact


class Cache(HFCache):
    """Keys and values of `rows` sequences, `slots` tokens each, for `layers` attention layers.

    It is a `transformers.Cache`, so Hugging Face modules take it as `cache` (or `past_key_values`) once `begin` was
    called for the pass. All state of a row is in `lengths_B` (int64, committed slots), `positions_BS` (int64, absolute
    position of the token in a slot) and `kv`.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        read_all: bool = False,
    ) -> None:
        super().__init__(layers=[])
        if min(rows, slots, layers) < 1:
            raise ValueError(f"cache of {rows} rows x {slots} slots x {layers} layers: each must be at least 1")
        self.slots = slots
        self.read_all = read_all
        # Memory of all rows, of which the first ones are in use (`arrange`).
        self._memory = (
            torch.zeros(layers, 2, rows, kv_heads, slots, head_dim, dtype=dtype, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, slots, dtype=torch.int64, device=device),
        )
        self._written = [0] * rows  # slots of each row of the memory that may hold something
        self._use(rows)
        # Of the pass in hand: slots read; where its new tokens start and end, if at the same slot in all rows.
        self._used = self._end = 0
        self._first: int | None = None
        self._offset = self._until = 0
        self._write_BT = self._prefix_BP = self._rows_B1 = torch.zeros(0)
        self._prefix: Tensor | None = None
        self._new_BT = torch.zeros(0)
        self._slots_S = torch.arange(slots, device=device)
        self.reach: int | None = None
        """Slots that passes read, the same for all rows; they must hold the longest row and the pass. None = as many as
        the longest row needs, which `begin` asks for and checks."""

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self.lengths_B.shape[0]

    def begin(self, positions_BT: Tensor, offset: int = 0, prefix_kv: Tensor | None = None) -> None:
        """Open a pass of T new tokens per row, at slots `lengths_B + offset` and following.

        `positions_BT` are their absolute positions; `offset` counts tokens appended by earlier passes that are not
        committed yet. `prefix_kv` [layers, 2, H, P, head_dim] (keys, values) takes the P slots behind the new tokens in
        every row, for this pass. Lengths do not change. Raises ValueError if a row has too few slots.
        """
        b, t = positions_BT.shape
        p = 0 if prefix_kv is None else prefix_kv.shape[3]
        if b != self.rows:
            raise ValueError(f"pass of {b} rows on a cache of {self.rows} rows: make the cache with rows={b}")
        self._offset, self._new_BT, self._prefix = offset, positions_BT, prefix_kv
        if self.reach is not None:
            self._used, self._first = self.reach, None
            self._written[:b] = [self.slots] * b
        else:
            lengths = self.lengths_B.tolist()
            self._written[:b] = [max(w, n + offset + t + p) for w, n in zip(self._written, lengths, strict=False)]
            longest = max(lengths)
            end = longest + offset + t + p
            if end > self.slots:
                raise ValueError(
                    f"cache overflow: row {lengths.index(longest)} holds {longest} tokens and {offset + t + p} more do "
                    f"not fit its {self.slots} slots; make the cache with at least {end} slots"
                )
            self._used = self.slots if self.read_all else end
            self._end, self._until = end, end - p
            self._first = longest + offset if min(lengths) == longest else None
        if p:  # the newest token's position, so that no window cuts the prefix off
            positions_BT = torch.cat([positions_BT, positions_BT.amax(1, keepdim=True).expand(b, p)], 1)
        if self._first is not None:
            self.positions_BS[:, self._first : self._end] = positions_BT
        else:
            write_BT = self.lengths_B[:, None] + offset + self._slots_S[: t + p]
            self.positions_BS.scatter_(1, write_BT, positions_BT)
            self._write_BT, self._prefix_BP = write_BT.split([t, p], dim=1)
            self._rows_B1 = torch.arange(b, device=write_BT.device)[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values [B, H, T, head_dim]; return that layer's used slots, both
        [B, H, S_used, head_dim]. The further arguments are those of `transformers.Cache.update` and have no effect."""
        k_BHSD, v_BHSD = self._keys[layer_idx], self._values[layer_idx]
        if (place := key_states.device) != k_BHSD.device:  # of a layer that is on another device (models/placement.py)
            used = self.update(key_states.to(k_BHSD.device), value_states.to(k_BHSD.device), layer_idx)
            return used[0].to(place), used[1].to(place)
        if self._first is not None:
            k_BHSD[:, :, self._first : self._until] = key_states
            v_BHSD[:, :, self._first : self._until] = value_states
            if self._prefix is not None:
                k_BHSD[:, :, self._until : self._end], v_BHSD[:, :, self._until : self._end] = self._prefix[layer_idx]
        else:
            # Not `scatter_`, which copies all slots.
            for held_BHSD, new_BHTD in ((k_BHSD, key_states), (v_BHSD, value_states)):
                held_BHSD.transpose(1, 2).index_put_((self._rows_B1, self._write_BT), new_BHTD.transpose(1, 2))
            if self._prefix is not None:
                for held_BHSD, prefix_HPD in zip((k_BHSD, v_BHSD), self._prefix[layer_idx], strict=True):
                    held_BHSD.transpose(1, 2).index_put_((self._rows_B1, self._prefix_BP), prefix_HPD.transpose(0, 1))
        return k_BHSD[:, :, : self._used], v_BHSD[:, :, : self._used]

    def open(self) -> tuple[Callable[[int, Tensor], object], Sequence[Tensor], Sequence[Tensor]]:
        """For runners that pass through the layers themselves: a function that writes layer i's new keys and values
        [2, B, H, T, head_dim], and per layer the used slots of keys and of values, both [B, H, S_used, head_dim]."""
        if self._first is not None:
            new_L = self.kv[..., self._first : self._until, :].unbind(0)
            if self._prefix is not None:
                self.kv[..., self._until : self._end, :] = self._prefix[:, :, None]

            def write(layer: int, new_2BHTd: Tensor) -> None:
                new_L[layer].copy_(new_2BHTd)
        else:
            kv_LBS2Hd = self.kv.permute(0, 2, 4, 1, 3, 5).unbind(0)
            places = self._rows_B1, self._write_BT
            if self._prefix is not None:
                for held_BS2Hd, prefix_2HPd in zip(kv_LBS2Hd, self._prefix, strict=True):
                    held_BS2Hd.index_put_((self._rows_B1, self._prefix_BP), prefix_2HPd.permute(2, 0, 1, 3))

            def write(layer: int, new_2BHTd: Tensor) -> None:
                kv_LBS2Hd[layer].index_put_(places, new_2BHTd.permute(1, 3, 0, 2, 4))

        used = self.kv[..., : self._used, :]
        return write, used[:, 0].unbind(0), used[:, 1].unbind(0)

    def new_slots(self) -> Tensor:
        """int64 [B, T]: where the pass's new tokens are written."""
        return self.lengths_B[:, None] + self._offset + self._slots_S[: self._new_BT.shape[1]]

    def first_to_end(self) -> int | None:
        """Slot of the pass's first new token, if it is the same in all rows and nothing behind the pass is read; else
        None."""
        return self._first if self._end == self._used else None

    def mask(self, see_BTA: Tensor, window: int | None = None) -> Tensor:
        """Bool [B, 1, T, S_used]: what the T new tokens may see.

        `see_BTA` speaks of the uncommitted tail (A = offset + T + P: earlier appended tokens, the new ones, the prefix);
        committed slots are visible to all. With `window`, only tokens less than `window` positions back are.
        """
        if self._first is not None:
            see_BTS = torch.nn.functional.pad(see_BTA, (self._first - self._offset, 0), value=True)
            if self._end < self._used:
                see_BTS = torch.nn.functional.pad(see_BTS, (0, self._used - self._end), value=False)
        else:
            tail_BS = self._slots_S[: self._used] - self.lengths_B[:, None]
            index_BTS = tail_BS.clamp(0, see_BTA.shape[2] - 1)[:, None].expand(-1, see_BTA.shape[1], -1)
            inside_BS = tail_BS < see_BTA.shape[2]
            see_BTS = (see_BTA.gather(2, index_BTS) & inside_BS[:, None]) | (tail_BS < 0)[:, None]
        if window is not None:
            see_BTS = see_BTS & (self._new_BT[:, :, None] - self.positions_BS[:, None, : self._used] < window)
        return see_BTS[:, None]

    def commit(self, counts_B: Tensor) -> None:
        """Keep the first `counts_B` tokens of each row's appended tail."""
        self.lengths_B += counts_B

    def compact(self, path_BL: Tensor, counts_B: Tensor, *, read: bool = False) -> None:
        """Keep a path through the appended tail: token `path_BL[b, j]` of it (0 = first appended, ascending) becomes
        the j-th committed one, for j < counts_B[b]; entries beyond are not read. `read`: the host may read the path."""
        move = by_row if read and self.kv.device.type == "cpu" else compact
        move(self.kv, self.lengths_B, path_BL, counts_B, self.positions_BS)

    def truncate(self, lengths_B: Tensor) -> None:
        """Roll back to `lengths_B` committed slots per row. Raises ValueError if a row is shorter than that."""
        if bool((lengths_B > self.lengths_B).any()) or bool((lengths_B < 0).any()):
            raise ValueError(f"cannot roll back rows of {self.lengths_B.tolist()} tokens to {lengths_B.tolist()}")
        self.lengths_B.copy_(lengths_B)

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Empty the given rows (int64 indices; None = all) and zero their memory."""
        index = torch.arange(self.rows, device=self.lengths_B.device) if rows is None else rows
        self.lengths_B[index] = 0
        self.positions_BS[index] = 0
        self.kv[:, :, index] = 0
        for row in index.tolist():
            self._written[row] = 0

    def _wipe(self, row: int, first: int) -> None:
        """Zero what a row of the memory holds from slot `first` on."""
        if self._written[row] > first:
            self._memory[0][:, :, row, :, first : self._written[row]] = 0
        self._written[row] = first

    def _use(self, rows: int) -> None:
        kv, lengths_B, positions_BS = self._memory
        self.kv, self.lengths_B, self.positions_BS = kv[:, :, :rows], lengths_B[:rows], positions_BS[:rows]
        self._keys = [self.kv[i, 0] for i in range(len(kv))]
        self._values = [self.kv[i, 1] for i in range(len(kv))]

    def arrange(self, rows: Sequence[int], grown: int = 0) -> None:
        """Row i becomes what row `rows[i]` was, others are dropped; `grown` empty rows follow. In place: a row can only
        move forward (`rows[i] >= i`). Raises ValueError if there is no memory for so many rows."""
        if len(rows) + grown > len(self._memory[1]):
            raise ValueError(f"{len(rows) + grown} rows, the cache was made for {len(self._memory[1])}")
        lengths = self.lengths_B.tolist()
        for to, row in enumerate(rows):
            assert row >= to, "a row that is still to be moved would be overwritten"
            if row > to:
                n = lengths[row]
                self.kv[:, :, to, :, :n] = self.kv[:, :, row, :, :n]
                self.positions_BS[to, :n] = self.positions_BS[row, :n]
                self.lengths_B[to] = n
                self._wipe(to, n)
        for row in range(len(rows), len(rows) + grown):
            self._wipe(row, 0)
        self._use(len(rows) + grown)
        self.lengths_B[len(rows) :] = 0

    def adopt(self, first: int, other: Cache) -> None:
        """Copy what another cache's rows hold into the rows from `first` on."""
        b, longest = other.rows, int(other.lengths_B.max())
        self.kv[:, :, first : first + b, :, :longest] = other.kv[:, :, :, :, :longest]
        self.positions_BS[first : first + b, :longest] = other.positions_BS[:, :longest]
        self._written[first : first + b] = [max(w, longest) for w in self._written[first : first + b]]
        self.lengths_B[first : first + b] = other.lengths_B

    def fill(self, row: int, kv_L2HTd: Tensor) -> None:
        """Let an empty row hold the first T tokens of a sequence, by their keys and values [layers, 2, H, T, head_dim]."""
        t = kv_L2HTd.shape[3]
        self.kv[:, :, row, :, :t] = kv_L2HTd
        self.positions_BS[row, :t] = self._slots_S[:t]
        self._written[row] = max(self._written[row], t)
        self.lengths_B[row] = t

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens of the longest row (asked by Hugging Face modules that are given no positions)."""
        return int(self.lengths_B.max())

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Slots per row."""
        return self.slots

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that the pass in hand reads, and the first one's slot."""
        return self._used, 0


class PrefixCache(HFCache):
    """No memory: a pass without a cache whose attention also reads `prefix_kv` [layers, 2, H, P, head_dim], behind its
    own T tokens in every row. Gradients flow into it."""

    def __init__(self, prefix_kv: Tensor) -> None:
        super().__init__(layers=[])
        self.prefix_kv = prefix_kv

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """One layer's keys and values [B, H, T + P, head_dim]."""
        k_BHPD, v_BHPD = (
            self.prefix_kv[layer_idx].to(key_states.device)[:, None].expand(-1, key_states.shape[0], -1, -1, -1)
        )
        return torch.cat([key_states, k_BHPD], 2), torch.cat([value_states, v_BHPD], 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """No token came before."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a pass of `query_length` tokens reads, and the first one's place."""
        return query_length + self.prefix_kv.shape[3], 0
