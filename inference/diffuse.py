"""The decode loop of denoisers: look, decide, commit, block by block.

    results = diffuse(denoiser, prompts, SamplingParams(max_new_tokens=64), DiffuseConfig(strategy_of("threshold")))

Every row has its own block, its own finished text and its own cache length. A pass runs, per row, the places in its
*window*: what was finished but is in no cache yet, then the open block. Finished rows see no unfinished ones, so the
keys and values that they write are those of the finished text, exactly: the pass that writes a block is the first step
of the next one (`fuse`), or a pass by itself. With token shift the last finished row says what comes next; as it is
never run again, its word is taken at once, and that token is free.

Exact caches: none, block. Approximate ones, of a model that sees the whole canvas: prefix (what lies before the block is
read as it was at the block's start), dual (what lies behind it, too); of a block model with `sub_block`: dual (other
sub-blocks are read as they were at the sub-block's start).

Places beyond the budget are never run, places behind a decided end of the answer never decided. Every pass decides at
least one place of every unfinished row. Tests: tests/test_diffuse.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.unmask import Statistics, choose
from ..losses.probs import History, ParamRows, SamplingParams
from ..models.denoiser import Denoiser
from .branches import FreeDave, Lopa, SelfVerify, rival_fills, surest
from .canvas import Canvas, Window
from .commit import Event, Passes, Request, Result
from .selections import Everything
from .self_verify import SelfVerifying
from .speculate import check_prompt
from .step import Step, best, candidates, ranks, too_early
from .strategies import STRATEGIES, AdaBlock, Confidence, Edit, Pipeline, Remask, Strategy, rule_of

CacheKind = Literal["auto", "none", "block", "prefix", "dual"]


@dataclass(frozen=True)
class DiffuseConfig:
    """How a denoiser is decoded."""

    strategy: Strategy = field(default_factory=lambda: STRATEGIES["threshold"])
    """Which places a pass decides: an entry of STRATEGIES, or `strategy_of(name, settings)`."""
    block: int | None = None
    """Tokens decided together, of a model that sees the whole canvas; none = the model's own, which block models need."""
    sub_block: int | None = None
    """Places of a block that are decided before its next ones (Fast-dLLM v2 2509.26328: 8 of 32); none = all."""
    cache: CacheKind = "auto"
    """none, block (exact), prefix, dual (approximate); auto = block where the model has blocks, else none."""
    fuse: bool = True
    """A finished block is written by the next block's first pass; false, and always in `dual`: by a pass of its own."""
    window: int | None = None
    """Places behind the block that a model which sees the whole canvas is shown (approximate); none = all."""
    refresh: int | None = None
    """Passes until an approximate cache is written anew within a block; none = at its start only."""
    max_rows: int = 8
    """Requests decoded together."""

    def __post_init__(self) -> None:
        for name in ("block", "sub_block", "refresh", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"diffuse: {name}={value}, must be an integer >= 1")
        if self.window is not None and self.window < 0:
            raise ValueError(f"diffuse: window={self.window}, must be an integer >= 0")
        if self.cache not in ("auto", "none", "block", "prefix", "dual"):
            raise ValueError(f"diffuse: cache={self.cache!r}: use auto, none, block, prefix or dual")
        s = self.strategy
        beside = s.apply is not None or s.soft is not None or s.schedule is not None
        if s.verify is not None and (beside or self.sub_block is not None or self.approximate_cache):
            raise ValueError(
                "diffuse: branches (freedave, lopa, s2d2) run with a score, a selection and an exact cache alone: leave apply, "
                "soft, schedule, sub_block and approximate caches away"
            )
        if isinstance(s.verify, SelfVerify):
            plain = s.select == Everything() and s.score == Confidence() and s.stop is None
            if not plain or self.cache not in ("auto", "block") or not self.fuse or self.block is not None:
                raise ValueError(
                    "diffuse: s2d2 drafts whole blocks and has its own cache: it takes no other selection, score, stop, "
                    "cache, fuse or block"
                )
        if self.sub_block is not None and (s.apply is not None or isinstance(s.schedule, Pipeline)):
            raise ValueError("diffuse: sub_block does not go with edits, remasking or several open blocks")

    @property
    def approximate_cache(self) -> bool:
        """Whether some keys and values are older than the tokens that they stand for."""
        return self.cache in ("prefix", "dual")


def fit(denoiser: Denoiser, decode: DiffuseConfig) -> DiffuseConfig:
    """The settings with what the model decides filled in. Raises ValueError for what it cannot do."""
    if isinstance(decode.strategy.verify, SelfVerify):
        return decode  # it has a loop of its own
    cache = decode.cache
    if cache == "auto":
        cache = "block" if denoiser.causal else "none"
    if cache == "block" and not denoiser.causal:
        raise ValueError("diffuse: cache='block' is for models with blocks; this one sees the whole canvas: use none")
    if cache == "prefix" and denoiser.causal:
        raise ValueError("diffuse: cache='prefix': of a model with blocks the exact cache is cache='block'")
    if cache == "dual" and denoiser.causal and decode.sub_block is None:
        raise ValueError("diffuse: cache='dual' of a model with blocks needs sub_block")
    if denoiser.causal and decode.block not in (None, denoiser.block):
        raise ValueError(
            f"diffuse: block={decode.block}: this model was trained with block {denoiser.block} and needs it; use sub_block "
            "or a threshold to decide fewer tokens at once"
        )
    if denoiser.dual and cache == "none":
        raise ValueError(
            "diffuse: cache='none': in dual finished text is read in another view, from a cache: use block"
        )
    if denoiser.causal and decode.window is not None:
        raise ValueError("diffuse: window is for models that see the whole canvas")
    strategy = decode.strategy
    if isinstance(strategy.schedule, AdaBlock) and not strategy.schedule.delimiters:
        if denoiser.tokenizer is None:
            raise ValueError("adablock: without a tokenizer it needs delimiters, the ids that end a block")
        newline = denoiser.tokenizer.encode("\n", add_special_tokens=False)[-1:]
        strategy = replace(strategy, schedule=replace(strategy.schedule, delimiters=tuple(newline)))
    return replace(decode, cache=cache, block=decode.block or denoiser.block, strategy=strategy)


def diffuse(
    denoiser: Denoiser,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    decode: DiffuseConfig | None = None,
    *,
    on_event: Callable[[Event], None] | None = None,
) -> list[Result]:
    """Answer every prompt (token ids), in order.

    `params`: one for all, or one per prompt. `on_event` is called, with text, for every pass and row whose certain text
    grew. Raises ValueError for prompts and settings that do not fit the model.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(each)} sampling parameters for {len(prompts)} prompts: give one, or one per prompt")
    for i, prompt in enumerate(prompts):
        check_prompt(denoiser, i, prompt, each[i])
    decode = fit(denoiser, decode or DiffuseConfig())
    results = []
    for first in range(0, len(prompts), decode.max_rows):
        rows = range(first, min(first + decode.max_rows, len(prompts)))
        tokenizer, eos_ids = denoiser.tokenizer, denoiser.facts.eos_ids
        requests = [Request(i, prompts[i], each[i], eos_ids, tokenizer, on_event is not None) for i in rows]
        batch = batch_of(denoiser, requests, decode)
        while any(r.stop_reason is None for r in requests):
            for event in batch.step():
                if on_event is not None:
                    on_event(event)
        each_order = batch.orders()
        results += [r.result(passes=p, order=o) for r, p, o in zip(requests, batch.passes, each_order, strict=True)]
    return results


def batch_of(denoiser: Denoiser, requests: list[Request], decode: DiffuseConfig) -> _Batch | SelfVerifying:
    """The closed batch that answers these requests, step by step; `decode` as `fit` returns it."""
    verify = decode.strategy.verify
    if any(r.params.grammar is not None for r in requests):
        raise ValueError(
            "grammar: a denoiser decides tokens out of order, and grammars are followed from left to right"
        )
    if isinstance(verify, SelfVerify):
        return SelfVerifying(denoiser, requests, verify)
    return _Batch(denoiser, requests, decode)


class _Batch:
    """Requests that are decoded together, and everything that lives as long as they do. X = B * G rows run, G branches
    per request."""

    def __init__(self, denoiser: Denoiser, requests: list[Request], decode: DiffuseConfig) -> None:
        self.denoiser, self.requests, self.decode, self.strategy = denoiser, requests, decode, decode.strategy
        self.device = denoiser.device
        self.canvas = Canvas(denoiser, requests, decode)
        verify = self.strategy.verify
        beside = verify.rivals if isinstance(verify, Lopa) else verify.drafts if isinstance(verify, FreeDave) else 0
        self.groups = 1 + beside
        self.params = ParamRows.pack([r.params for r in requests], self.device)
        self.seeds_B = torch.tensor([r.seed for r in requests], device=self.device)
        self.passes = [Passes() for _ in requests]
        self.counted = [0] * len(requests)  # answer tokens handed to the requests
        self.memory: dict[str, Tensor] = {}
        self.fills_BGC: Tensor | None = None  # of the next pass
        self.fill_ids_BC = torch.zeros(0)
        v = denoiser.facts.vocab
        self.prompt_BV = self.early_B1 = None
        if self.params.penalises:
            self.prompt_BV = torch.zeros(len(requests), v, dtype=torch.bool, device=self.device)
            for row, request in enumerate(requests):
                self.prompt_BV[row, torch.tensor(request.prompt, device=self.device)] = True
        if any(r.params.min_new_tokens for r in requests):
            self.early_B1 = torch.tensor([[r.params.min_new_tokens] for r in requests], device=self.device)
        self.cache = None
        if decode.cache != "none":
            self.cache = denoiser.new_cache(len(requests) * self.groups, self.canvas.cache_slots)

    @torch.no_grad()
    def step(self) -> list[Event]:
        """One pass for every request that is not done."""
        clock = time.perf_counter()
        canvas = self.canvas
        live_B = torch.tensor([r.stop_reason is None for r in self.requests], device=self.device)
        window = canvas.window(live_B)
        hidden_BGTD = self._forward(window)
        first = not bool(canvas.begun_B.any())
        self._count(window)
        free_B = canvas.wrote(window)
        if bool(free_B.any()):
            at_B1 = window.row_of(canvas.start_B[:, None] - 1)
            rows_B = torch.arange(len(at_B1), device=self.device)
            hidden_B1D = hidden_BGTD[rows_B, 0][rows_B[:, None], at_B1.clamp(min=0)]
            token_B1 = self._candidates(hidden_B1D, canvas.start_B[:, None])[1]
            canvas.put(canvas.start_B[:, None], token_B1, free_B[:, None])
        working_B = window.runs_B & ~window.kv_B
        if bool(working_B.any()):
            self._work(window, hidden_BGTD, working_B)
        moved_B = canvas.advance(live_B)
        if bool(moved_B.any()):
            self._move(moved_B)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for request in self.requests:
            request.stats.seconds["prefill" if first else "verify"] += (time.perf_counter() - clock) / len(
                self.requests
            )
        return self._events()

    def orders(self) -> list[list[int]]:
        """Per request and answered token, the pass that decided it (`Result.order`)."""
        rows = zip(self.canvas.when_BS.tolist(), self.requests, strict=True)
        return [when[len(r.prompt) : len(r.prompt) + len(r.ids)] for when, r in rows]

    def _forward(self, window: Window) -> Tensor:
        """Run the window of every branch: last hidden states [B, G, T, D]."""
        canvas, g = self.canvas, self.groups
        ids_BGS = canvas.ids_BS[:, None].repeat(1, g, 1)
        if self.fills_BGC is not None:
            place_BGC = canvas.places()[:, None].expand_as(self.fills_BGC)
            ids_BGC = torch.where(self.fills_BGC, self.fill_ids_BC[:, None], ids_BGS.gather(2, place_BGC))
            ids_BGS.scatter_(2, place_BGC, ids_BGC)
        ids_BGT = ids_BGS.gather(2, window.places_BT[:, None].expand(-1, g, -1))
        inputs = torch.where(window.use_BT[:, None], ids_BGT, 0).flatten(0, 1)
        if self.strategy.soft is not None:
            inputs = self._mix(inputs, window)
        if self.cache is not None:
            self.cache.truncate(torch.minimum(self.cache.lengths_B, window.lengths_B.repeat_interleave(g)))
        hidden_XTD = self.denoiser.denoise(
            inputs,
            window.positions_BT.repeat_interleave(g, 0),
            cache=self.cache,
            see_BTA=window.see_BTT.repeat_interleave(g, 0),
            view="clean" if self.denoiser.dual and bool(window.kv_B.any()) else "noisy",
        )
        if self.cache is not None:
            self.cache.commit(window.stay_B.repeat_interleave(g))
        return hidden_XTD.unflatten(0, (-1, g))

    def _mix(self, ids_BT: Tensor, window: Window) -> Tensor:
        """Embeddings [B, T, D], those of soft places mixed."""
        canvas, embed = self.canvas, self.denoiser.embed
        p_BT1 = canvas.soft_BS.gather(1, window.places_BT)[..., None]
        own_BTD, other_BTD = embed(ids_BT), embed(canvas.soft_ids_BS.gather(1, window.places_BT))
        p_BT1 = p_BT1.to(own_BTD.dtype)
        mixed_BTD = p_BT1 * other_BTD + (1 - p_BT1) * own_BTD
        norm_BT1 = p_BT1 * other_BTD.norm(dim=-1, keepdim=True) + (1 - p_BT1) * own_BTD.norm(dim=-1, keepdim=True)
        scaled_BTD = mixed_BTD * norm_BT1 / mixed_BTD.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return torch.where(p_BT1 > 0, scaled_BTD, own_BTD)

    def _candidates(self, hidden_BCD: Tensor, place_BC: Tensor) -> tuple[Tensor, Tensor, Tensor, Statistics]:
        return candidates(self.denoiser, hidden_BCD, place_BC, self.params, self.seeds_B, self._history(place_BC))

    def _history(self, place_BC: Tensor) -> History:
        canvas, c = self.canvas, place_BC.shape[1]
        prompt_RV = counts_RV = banned_RV = None
        if self.prompt_BV is not None:
            counts_BV = torch.zeros_like(self.prompt_BV, dtype=torch.int64)
            counts_BV.scatter_add_(1, canvas.tokens(), canvas.decided().long())
            prompt_RV, counts_RV = self.prompt_BV.repeat_interleave(c, 0), counts_BV.repeat_interleave(c, 0)
        if self.early_B1 is not None:
            banned_RV = too_early(place_BC, canvas.prompt_B, self.early_B1, canvas.stops_BV)
        return History(self.denoiser.facts.tokens, prompt_RV, counts_RV, banned_RV)

    def _work(self, window: Window, hidden_BGTD: Tensor, working_B: Tensor) -> None:
        """Decide places of the open blocks of the rows in `working_B`."""
        canvas, g = self.canvas, self.groups
        place_BC = canvas.places()
        at_BC = window.row_of(place_BC - int(self.denoiser.shift))
        rows_B1 = torch.arange(len(at_BC), device=self.device)[:, None]
        hidden_BGCD = hidden_BGTD.transpose(1, 2)[rows_B1, at_BC.clamp(min=0)].transpose(1, 2)
        said_BC = at_BC >= 0
        fills_BGC, self.fills_BGC = self.fills_BGC, None
        before_BC = canvas.ids_BS.gather(1, place_BC)
        hidden_BCD = hidden_BGCD[:, 0]
        if isinstance(self.strategy.verify, Lopa) and fills_BGC is not None:
            hidden_BCD = self._adopt(hidden_BGCD, fills_BGC, place_BC)
        step, score_BC, chosen_BC = self._decide(hidden_BCD, said_BC, working_B)
        if isinstance(self.strategy.verify, FreeDave) and fills_BGC is not None:
            alive_B = working_B
            for branch in range(1, g):  # as far as the branch is what has come of the one before it
                drafted_BC = torch.where(fills_BGC[:, branch], self.fill_ids_BC, before_BC)
                same_B = (canvas.ids_BS.gather(1, place_BC) == drafted_BC).all(1)
                alive_B = alive_B & same_B & canvas.unfinished()
                if not bool(alive_B.any()):
                    break
                later = self._decide(hidden_BGCD[:, branch], said_BC, alive_B)
                step, chosen_BC = _merge(step, later[0], alive_B), torch.where(alive_B[:, None], later[2], chosen_BC)
        if self.strategy.verify is not None:
            self._draft(step, score_BC, chosen_BC)

    def _decide(self, hidden_BCD: Tensor, said_BC: Tensor, working_B: Tensor) -> tuple[Step, Tensor, Tensor]:
        """Look at the canvas through one pass's hidden states, choose, write."""
        canvas, strategy = self.canvas, self.strategy
        place_BC = canvas.places()
        logits_BCV, best_BC, confidence_BC, found = self._candidates(hidden_BCD, place_BC)
        ends_BC = canvas.stops_BV.gather(1, best_BC)
        step = canvas.look(said_BC & working_B[:, None], logits_BCV, best_BC, confidence_BC, ends_BC, self.memory)
        if isinstance(strategy.schedule, AdaBlock):
            canvas.cut(torch.where(working_B, strategy.schedule.cut(step), 0))
            step = canvas.look(said_BC & working_B[:, None], logits_BCV, best_BC, confidence_BC, ends_BC, self.memory)
        step.hidden_BCD, step.found = hidden_BCD, found
        old = dict(self.memory)
        score_BC, chosen_BC = self._choose(step)
        self._restore(old, working_B)
        canvas.put(place_BC, best_BC, chosen_BC)
        changed_BC = torch.zeros_like(chosen_BC)
        if isinstance(strategy.apply, Edit):
            changed_BC = strategy.apply(step, chosen_BC)
            canvas.put(place_BC, best_BC, changed_BC)
        elif isinstance(strategy.apply, Remask):
            canvas.take_back(place_BC, strategy.apply(step, chosen_BC))
        if strategy.soft is not None:
            soft_BC = step.open_BC & ~chosen_BC & (confidence_BC >= strategy.soft.soft)
            canvas.soften(place_BC, best_BC, torch.where(soft_BC, confidence_BC, 0.0))
        full_B = ~(step.open_BC & step.first_BC).any(1)
        more_B = torch.zeros_like(working_B)
        if isinstance(strategy.schedule, Pipeline):
            more_B = strategy.schedule.opens(step, chosen_BC)
        canvas.passed(working_B, full_B, changed_BC.any(1), more_B & working_B)
        return step, score_BC, chosen_BC

    def _choose(self, step: Step) -> tuple[Tensor, Tensor]:
        """Score, select, and decide the best place of a row whose first block got none."""
        strategy = self.strategy
        score_BC = strategy.score(step)
        if (ruled := rule_of(strategy, step)) is not None and step.found is not None:
            return score_BC, choose(step.found, step.open_BC, *ruled)
        chosen_BC = strategy.select(step, score_BC) & step.open_BC
        if strategy.stop is not None:
            chosen_BC = chosen_BC | (step.open_BC & strategy.stop(step)[:, None])
        if isinstance(strategy.schedule, Pipeline):
            chosen_BC = chosen_BC | strategy.schedule.more(step, score_BC, chosen_BC)
        lacks_B1 = ~(chosen_BC & step.first_BC).any(1, keepdim=True)
        return score_BC, chosen_BC | (best(score_BC, step.open_BC & step.first_BC) & lacks_B1)

    def _restore(self, old: dict[str, Tensor], working_B: Tensor) -> None:
        """Rows that this pass was not about remember what they knew."""
        for name, new in self.memory.items():
            before = old.get(name, torch.zeros_like(new))
            self.memory[name] = torch.where(working_B.view(-1, *[1] * (new.dim() - 1)), new, before)

    def _adopt(self, hidden_BGCD: Tensor, fills_BGC: Tensor, place_BC: Tensor) -> Tensor:
        """LoPA: the canvas becomes the branch whose undecided places are surest. Its hidden states [B, C, D]."""
        canvas, g = self.canvas, self.groups
        each = [self._candidates(hidden_BGCD[:, k], place_BC)[2] for k in range(g)]
        masked_BGC = canvas.undecided(place_BC)[:, None] & ~fills_BGC
        branch_B = surest(torch.stack(each, 1), masked_BGC) * fills_BGC.flatten(1).any(1)
        rows_B = torch.arange(len(branch_B), device=self.device)
        canvas.put(place_BC, self.fill_ids_BC, fills_BGC[rows_B, branch_B])
        return hidden_BGCD[rows_B, branch_B]

    def _draft(self, step: Step, score_BC: Tensor, chosen_BC: Tensor) -> None:
        """The branches of the next pass, from what this one said."""
        verify = self.strategy.verify
        left_BC = step.open_BC & ~chosen_BC
        assert isinstance(verify, Lopa | FreeDave)
        if isinstance(verify, Lopa):
            fills_BGC = rival_fills(ranks(score_BC, left_BC), left_BC, verify.rivals)
        else:
            drafts, step = [torch.zeros_like(chosen_BC)], replace(step, memory=dict(self.memory))
            for _ in range(self.groups - 1):
                step = replace(step, open_BC=left_BC, passes_B=step.passes_B + 1, left_B=step.left_B - chosen_BC.sum(1))
                _, chosen_BC = self._choose(step)
                drafts.append(drafts[-1] | chosen_BC)
                left_BC = left_BC & ~chosen_BC
            fills_BGC = torch.stack(drafts, 1)
        if bool(fills_BGC.any()):
            self.fills_BGC, self.fill_ids_BC = fills_BGC, step.best_BC

    def _move(self, moved_B: Tensor) -> None:
        """Rows went on to another block: what is known by column moves along; branches of theirs are void."""
        c = self.canvas.width
        from_BC = torch.arange(c, device=self.device) + moved_B[:, None]
        for name, old in self.memory.items():
            index = from_BC.view(*from_BC.shape, *[1] * (old.dim() - 2)).expand(-1, -1, *old.shape[2:])
            self.memory[name] = pad(old, [0, 0] * (old.dim() - 2) + [0, c]).gather(1, index.clamp(max=2 * c - 1))
        if self.fills_BGC is not None:
            self.fills_BGC = self.fills_BGC & (moved_B == 0)[:, None, None]

    def _count(self, window: Window) -> None:
        branches_B = torch.zeros_like(window.kv_B).long()
        if self.fills_BGC is not None:
            branches_B = self.fills_BGC.any(2).sum(1)
        begun = self.canvas.begun_B.tolist()
        for row, (runs, kv) in enumerate(zip(window.runs_B.tolist(), window.kv_B.tolist(), strict=True)):
            if runs:
                kind = "denoise" if not kv else "kv_only" if begun[row] else "prefill"
                setattr(self.passes[row], kind, getattr(self.passes[row], kind) + 1)
                self.passes[row].branches += int(branches_B[row])

    def _events(self) -> list[Event]:
        """Hand the requests what is certain now."""
        final, ids = self.canvas.final_B(isinstance(self.strategy.apply, Edit | Remask)).tolist(), None
        events = []
        for row, request in enumerate(self.requests):
            made = final[row] - len(request.prompt)
            if request.stop_reason is None and made > self.counted[row]:
                ids = self.canvas.ids_BS.tolist() if ids is None else ids
                start = len(request.prompt)
                events.append(request.commit(ids[row][start + self.counted[row] : start + made], 0))
                self.counted[row] = made
        return events


def _merge(old: Step, new: Step, rows_B: Tensor) -> Step:
    """The rows of `new` where `rows_B`, those of `old` elsewhere."""
    parts: dict[str, Any] = {}
    for part in fields(old):
        a, b = getattr(old, part.name), getattr(new, part.name)
        if isinstance(a, Tensor):
            parts[part.name] = torch.where(rows_B.view(-1, *[1] * (a.dim() - 1)), b, a)
    return replace(old, found=None, **parts)
