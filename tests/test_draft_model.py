"""Draft models: their first weights, their own samples, other vocabularies; what they must not be.

pytest tests/test_draft_model.py
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batches import packed_row
from torch import Tensor

from draftsmith.configs.training import BudgetConfig, StatesConfig, TrainConfig, check
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models.draft_model import DraftModel, DraftModelConfig, last_answers, load_draft_model
from draftsmith.models.drafter import Batch, Commit, Prefill, TargetOut
from draftsmith.models.families import FAMILIES
from draftsmith.models.intersection import byte_symbols, intersect, spellings
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.small_lm import LMConfig, first_layers, random_model, settings_of
from draftsmith.models.target import Target, document_mask

LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def make(target: Any, lm: dict[str, Any] | None = None, draft_ids: Tensor | None = None, **options: Any) -> DraftModel:
    torch.manual_seed(3)
    drafter = DraftModel(DraftModelConfig(lm=LMConfig(**(lm or {})), **options), target.facts, draft_ids)
    drafter.init_from_target(target)
    return drafter


def states(target: Any, batch: Batch) -> TargetOut:
    out = target.forward(batch.ids_BT, batch.positions_BT, see_BTA=document_mask(batch.samples_BT))
    return TargetOut(None, out.last_hidden_BTD, head=target.head, embed=target.embed)


def save(target: Target, folder: Path) -> str:
    """An ordinary checkpoint of a tiny target, with its tokenizer."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return str(folder)


# First weights


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_of_the_target_are_the_target(family: str, tiny: Callable[..., Target]) -> None:
    """Every family, windows included: the settings describe the model, and the copied weights compute its logits."""
    target = tiny(family=family, window=5)
    settings = settings_of(target.model)
    assert settings == json.loads(json.dumps(settings))
    torch.manual_seed(0)
    assert settings_of(random_model(settings)) == settings
    whole = make(target, {"layers": 4}).eval()
    ids_BT = torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(2))
    at_BT = torch.arange(12).expand(2, 12)
    want = target.head(target.forward(ids_BT, at_BT).last_hidden_BTD)
    torch.testing.assert_close(whole.say(whole.read(ids_BT, at_BT)), want)


def test_the_first_layers_are_the_targets_own_copies(target: Target) -> None:
    """The stream after n layers is the target's; nothing is shared with it, and everything is trained."""
    model = first_layers(target, 2)
    ids_BT = torch.randint(3, 250, (1, 9))
    at_BT = torch.arange(9)[None]
    tap = target.forward(ids_BT, at_BT, taps=(2,)).taps_BTPD
    assert tap is not None
    torch.testing.assert_close(model.model(ids_BT).last_hidden_state, target.norm(tap[:, :, 0]))
    theirs = {p.data_ptr() for p in target.model.parameters()}
    drafter = make(target, {"layers": 2})
    assert not theirs & {p.data_ptr() for p in drafter.parameters()}
    assert all(p.requires_grad for p in drafter.parameters())
    assert set(drafter.state_dict()) == set(model.state_dict())  # an ordinary checkpoint's names
    assert make(target).config.lm.architecture == settings_of(first_layers(target, 1))  # one in eight, at least one


def test_a_half_precision_target_gives_fp32_masters(tiny: Callable[..., Target]) -> None:
    drafter = make(tiny(dtype=torch.bfloat16))
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}


def test_frozen_embeddings_are_not_trained(tiny: Callable[..., Target]) -> None:
    for tied in (False, True):
        drafter = make(tiny(tied=tied), {"train_embeddings": False})
        frozen = {n for n, p in drafter.named_parameters() if not p.requires_grad}
        assert frozen == ({"model.embed_tokens.weight"} if tied else {"model.embed_tokens.weight", "lm_head.weight"})


def test_a_checkpoint_as_it_stands_is_always_right(target: Target, tmp_path: Path) -> None:
    """The target as its own draft model: every draft is accepted, chains and trees."""
    name = save(target, tmp_path / "x")
    params = SamplingParams(max_new_tokens=16)
    prompts = [[5, 6, 7], [9] * 6, [40, 41]]
    plain = generate(target, prompts, params)
    drafter = load_draft_model(name, target)
    assert not any(p.requires_grad for p in drafter.parameters()) and not drafter.training
    for decode in (DecodeConfig(k=4), DecodeConfig(k=3, tree="static", width=3, nodes=10)):
        results = generate(target, prompts, params, drafter, decode)
        assert [r.ids for r in results] == [r.ids for r in plain]
        assert all(a == 1.0 for r in results for a in r.stats.alpha)


def test_random_weights_of_another_shape(target: Target) -> None:
    drafter = make(target, {"start": "random", "architecture": LLAMA})
    again = make(target, {"start": "random", "architecture": LLAMA})
    other = DraftModel(drafter.config, target.facts)  # as a load does: the architecture is in the config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor) and other.state_dict()[name].shape == tensor.shape
    batch = packed_row([(0, 20, 5)])
    terms = drafter(batch, states(target, batch), 0.0)
    assert bool(terms.losses["depth_1"].isfinite())
    with pytest.raises(ValueError, match="300 rows, tiny 256: set the same vocab_size"):
        make(target, {"start": "random", "architecture": LLAMA | {"vocab_size": 300}})


@pytest.mark.parametrize(
    ("lm", "words"),
    [
        ({"start": "half"}, "layers, model, random, got 'half'"),
        ({"start": "model"}, "lm.model goes with"),
        ({"model": "x/y"}, "lm.model goes with"),
        ({"layers": 0}, "at least 1"),
        ({"start": "random", "architecture": LLAMA, "layers": 2}, "goes with lm.start=layers"),
        ({"revision": "abc"}, "goes with lm.start=model"),
        ({"start": "random"}, "model_type"),
        ({"start": "random", "architecture": {"hidden_size": 4}}, "model_type"),
        ({"layers": 5}, "lm.layers=5, but tiny has 4 layers"),
        ({"start": "random", "architecture": {"model_type": "no such"}}, "'no such' can be built"),
        ({"start": "random", "architecture": {"model_type": "gpt2"}}, "'gpt2'"),
        ({"start": "random", "architecture": LLAMA | {"auto_map": {"AutoModel": "x.y"}}}, "auto_map not allowed"),
        ({"start": "random", "architecture": LLAMA | {"_attn_implementation": "a/b"}}, "not allowed"),
        ({"start": "random", "architecture": LLAMA | {"num_hidden_layers": 10**9}}, "1..1000"),
        ({"start": "random", "architecture": LLAMA | {"hidden_size": "wide"}}, "can be built"),
        ({"architecture": LLAMA}, "leave it out"),
    ],
)
def test_models_that_cannot_be_had_are_refused(lm: dict[str, Any], words: str, target: Target) -> None:
    with pytest.raises(ValueError, match=words):
        make(target, lm)


def test_drafting_before_it_has_a_model_is_refused(target: Target) -> None:
    bare = DraftModel(DraftModelConfig(), target.facts)
    with pytest.raises(ValueError, match="call init_from_target"):
        bare.bind(target)
    with pytest.raises(ValueError, match="bound to no target"):
        bare.init(Prefill(1, 8, torch.device("cpu"), torch.float32))


def test_casting_leaves_rotary_tables_alone(target: Target) -> None:
    drafter = make(target)
    tables = {n: b.clone() for n, b in drafter.named_buffers() if "inv_freq" in n}
    half = drafter.to(torch.bfloat16)
    assert tables and all(torch.equal(dict(half.named_buffers())[n], t) for n, t in tables.items())
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_nothing_is_drafted_beyond_the_models_own_positions(target: Target) -> None:
    """A model of 16 positions beside a target of 2,048: valid up to its last, then silent, and the answer is right."""
    drafter = make(target, {"start": "random", "architecture": LLAMA | {"max_position_embeddings": 16}}).eval()
    state = drafter.init(Prefill(1, 40, torch.device("cpu"), torch.float32))
    ids_BT = torch.arange(10, 30)[None]
    commit = Commit(ids_BT[:, :14], torch.tensor([14]), torch.arange(14)[None], ids_BT[:, 14])
    state, level = drafter.start(state, commit)  # the anchor stands at 14
    assert level.valid_BN.tolist() == [[True]]
    state, level = drafter.extend(state, torch.tensor([[7]]), torch.tensor([[0]]))
    assert level.valid_BN.tolist() == [[True]]
    state, level = drafter.extend(state, torch.tensor([[7]]), torch.tensor([[1]]))
    assert level.valid_BN.tolist() == [[False]]
    params = SamplingParams(max_new_tokens=20)
    plain, fast = (generate(target, [[5, 6, 7]], params, d)[0] for d in (None, drafter))
    assert plain.ids == fast.ids


# The loss


def test_loss_is_the_divergence_of_the_two_models(target: Target) -> None:
    """KL from both models' own forward passes, one document at a time; deeper figures are depth 1's, further on."""
    batch = packed_row([(0, 20, 8), (1, 15, 4)])
    drafter = make(target, depths=3)
    terms = drafter(batch, states(target, batch), 0.0)
    total, hits, runs = torch.zeros(()), [], []
    for start, n, first in ((0, 20, 8), (23, 15, 4)):
        ids_BT = batch.ids_BT[:, start : start + n]
        p, q = (model(ids_BT).logits[0].log_softmax(-1) for model in (target.model, drafter.body.model))  # type: ignore[union-attr]
        rows = range(first, n - 1)  # from the answer's first token, the anchor of its second
        total = total + F.kl_div(q[rows], p[rows], log_target=True, reduction="sum")
        right = (q[rows].argmax(-1) == p[rows].argmax(-1)).long()
        hits.append(int(right.sum()))
        runs += [int(right[i : i + 3].cumprod(0).sum()) for i in range(len(right) - 2)]
    torch.testing.assert_close(terms.losses["depth_1"], total)
    assert set(terms.losses) == {"depth_1"} and drafter.denominators(batch, 0.0) == {"depth_1": 11.0 + 10.0}
    assert float(terms.metrics["accuracy_1"][0]) == sum(hits)
    assert [float(x) for x in terms.metrics["run_length"]] == [sum(runs), len(runs)]
    assert float(terms.metrics["accuracy_3"][1]) == len(runs)


# Own samples


def test_last_answers() -> None:
    batch = packed_row([(4, 8, 3), (5, 5, 4), (6, 6, 6), (7, 7, 0)], padding=0)
    batch.supervised_BT[0, 5] = False  # document 4: tokens 3 4 . 6 7
    found = [(s.sample, s.start, s.anchor, s.end) for s in last_answers(batch)]
    assert found == [(4, 0, 6, 8), (7, 19, 19, 26)]  # 5 has one token, 6 none
    assert last_answers(packed_row([(1, 4, 4)])) == []


def test_own_samples_replace_the_last_answers_and_nothing_else(target: Target) -> None:
    batch = packed_row([(0, 20, 8), (1, 15, 4), (2, 12, 12)])
    drafter = make(target, on_policy=1.0)
    fresh = drafter.rewrite(batch, 0.0)
    changed = (fresh.ids_BT != batch.ids_BT)[0]
    answers = torch.zeros(56, dtype=torch.bool)
    answers[9:20] = answers[28:38] = True  # behind the first token of each answer
    assert bool(changed.any()) and not bool((changed & ~answers).any())
    assert torch.equal(fresh.positions_BT, batch.positions_BT) and torch.equal(fresh.samples_BT, batch.samples_BT)
    assert drafter.denominators(batch, 0.0) == {"depth_1": 21.0}
    again = drafter.rewrite(batch, 0.5)
    assert torch.equal(again.ids_BT, fresh.ids_BT)
    for other in (dataclasses.replace(batch, epoch=1), dataclasses.replace(batch, seed=1)):
        assert not torch.equal(drafter.rewrite(other, 0.0).ids_BT, fresh.ids_BT)
    assert make(target).rewrite(batch, 0.0) is batch  # off by default


def test_own_samples_do_not_depend_on_packing(target: Target) -> None:
    drafter = make(target, on_policy=1.0, draft_ids=torch.arange(0, 250, 2))
    packed = drafter.rewrite(packed_row([(0, 20, 8), (1, 15, 4)]), 0.0)
    full = packed_row([(0, 20, 8), (1, 15, 4)])
    alone = Batch(*(getattr(full, f.name)[:, 23:38] for f in dataclasses.fields(Batch)[:4]))
    assert torch.equal(drafter.rewrite(alone, 0.0).ids_BT, packed.ids_BT[:, 23:38])
    assert bool((packed.ids_BT[0, 9:20] % 2 == 0).all())  # of the draft vocabulary


def test_the_share_of_own_samples(target: Target) -> None:
    """40 % of 300 documents, the same ones whatever else is in the batch; others in another epoch."""
    drafter = make(target, {"start": "random", "architecture": LLAMA}, on_policy=0.4)
    batch = packed_row([(i, 5, 2) for i in range(300)], padding=0)

    def chosen(some: Batch) -> set[int]:
        return {int(s) for s in some.samples_BT[drafter.rewrite(some, 0.0).ids_BT != some.ids_BT]}

    first = chosen(batch)
    assert 90 < len(first) < 150
    half = Batch(*(getattr(batch, f.name)[:, :500] for f in dataclasses.fields(Batch)[:4]))
    assert chosen(half) == {s for s in first if s < 100}
    assert 30 < len(first - chosen(dataclasses.replace(batch, epoch=1))) < 120


def test_own_samples_are_drawn_from_the_model(target: Target) -> None:
    """With a head so sharp that drawing is choosing, the samples are the model's own greedy answer."""
    drafter = make(target, on_policy=1.0)
    with torch.no_grad():
        drafter.lm_head.weight.mul_(1e4)
    batch = packed_row([(0, 20, 8), (1, 15, 4)])
    fresh = drafter.rewrite(batch, 0.0)
    for start, anchor, end in ((0, 8, 20), (23, 27, 38)):
        ids = batch.ids_BT[0, start : anchor + 1].tolist()
        while len(ids) < end - start:
            ids.append(int(drafter.body.model(torch.tensor([ids])).logits[0, -1].argmax()))  # type: ignore[union-attr]
        assert fresh.ids_BT[0, start:end].tolist() == ids


def test_what_follows_a_drawn_end_weighs_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end token is learned, tokens behind it are not; counts stay the data's."""
    batch = packed_row([(0, 20, 8)])
    drafter = make(target, on_policy=1.0)
    drawn_SN = torch.full((1, 11), 9)
    drawn_SN[0, 4] = target.facts.eos_ids[0]
    monkeypatch.setattr(DraftModel, "_sample", lambda self, batch, spans, seed: drawn_SN)
    fresh = drafter.rewrite(batch, 0.0)
    assert fresh.supervised_BT[0, :20].tolist() == [8 <= t <= 13 for t in range(20)]
    terms = drafter(fresh, states(target, fresh), 0.0)
    assert float(terms.metrics["accuracy_1"][1]) == 5 and drafter.denominators(batch, 0.0) == {"depth_1": 11.0}


def test_settings_of_own_samples_are_checked() -> None:
    with pytest.raises(ValueError, match=r"share in \[0, 1\], got 1.5"):
        DraftModelConfig(on_policy=1.5)
    with pytest.raises(ValueError, match="ce would teach"):
        DraftModelConfig(on_policy=0.5, objective="0.5*kl + 0.5*ce")
    config = TrainConfig(method="draft_model", drafter=DraftModelConfig(on_policy=0.5), budget=BudgetConfig(steps=1))
    with pytest.raises(ValueError, match=r"states\.source=live"):
        check(config)
    check(dataclasses.replace(config, states=StatesConfig(source="live")))
    check(dataclasses.replace(config, drafter=DraftModelConfig()))


# Another vocabulary


class Words:
    """A tokenizer of given tokens; `pieces` says how a text is cut."""

    def __init__(self, tokens: list[str], special: tuple[str, ...] = (), pieces: Any = None, **ids: int) -> None:
        self.tokens, self.pieces = tokens, pieces
        self.added_tokens_decoder = {
            tokens.index(t): SimpleNamespace(content=t, special=True) for t in special if t in tokens
        }
        self.eos_token_id, self.unk_token_id, self.bos_token_id = ids.get("eos"), ids.get("unk"), ids.get("bos")

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [self.pieces(text) for text in texts]}


def side(tokenizer: Any) -> Any:
    return SimpleNamespace(tokenizer=tokenizer, facts=SimpleNamespace(vocab=len(tokenizer.get_vocab()), name="x"))


def test_tokens_are_compared_by_their_bytes() -> None:
    """Byte-level marks, SentencePiece marks and byte tokens, specials by name, ends by role."""
    symbols = byte_symbols()
    accented = "".join(symbols[b] for b in " é".encode())
    ours = Words(["<|end|>", "Ġthe", "the", "Ċ", accented, "<s>", "Ġonly", symbols[0xC3]], ("<|end|>", "<s>"), eos=0)
    theirs = Words(
        ["<unk>", "<s>", "</s>", "<0x0A>", "▁the", "the", "▁é", "<0x0B>", "▁on", "ly"],
        ("<unk>", "<s>", "</s>"),
        pieces=lambda text: {" only": [8, 9]}[text],
        eos=2,
        unk=0,
    )
    assert spellings(ours)[4] == ("text", " é".encode()) and spellings(theirs)[3] == ("byte", b"\n")
    shared = intersect(side(ours), side(theirs))
    pairs = dict(zip(shared.target_W.tolist(), shared.draft_W.tolist(), strict=True))
    assert pairs == {0: 2, 1: 4, 2: 5, 3: 3, 4: 6, 5: 1}
    assert shared.context_V.tolist() == [2, 4, 5, 3, 6, 1, 9, 0]  # " only": its last piece; half a character: unknown


def test_two_spellings_of_one_text_are_proposed_once() -> None:
    ours = Words(["A", "<0x41>", "▁"])
    theirs = Words(["<0x41>", "▁", "A"])
    shared = intersect(side(ours), side(theirs))
    assert shared.target_W.tolist() == [0, 2] and shared.draft_W.tolist() == [2, 1]
    assert shared.context_V.tolist() == [2, 2, 1]


def test_a_text_is_proposed_as_its_token_not_as_its_byte() -> None:
    """SentencePiece lists its bytes before its characters: a target never writes <0x41> where it has A."""
    ours = Words(["<0x41>", "<0x42>", "▁", "A"])
    for theirs in (Words(["▁", "A", "B"]), Words(["A", "Ġ", "B"])):
        shared = intersect(side(ours), side(theirs))
        at = {their: i for i, their in zip(shared.target_W.tolist(), shared.draft_W.tolist(), strict=True)}
        assert {theirs.tokens[their]: ours.tokens[i] for their, i in at.items()} in (
            {"▁": "▁", "A": "A", "B": "<0x42>"},
            {"Ġ": "▁", "A": "A", "B": "<0x42>"},
        )


def test_no_shared_token_is_refused() -> None:
    with pytest.raises(ValueError, match="shares no token"):
        intersect(side(Words(["a▁", "b"])), side(Words(["c▁", "d"], pieces=lambda text: [])))


@pytest.fixture
def stranger(tmp_path: Path) -> str:
    """A small checkpoint with a byte-level tokenizer of 300 tokens; the tiny target's has 256."""
    model = tiny_target(vocab=300, width=32, layers=2, seed=4)
    return save(model, tmp_path / "stranger")


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_greedy_output_with_another_vocabulary(shape: str, stranger: str, tiny: Callable[..., Target]) -> None:
    """Both ways round: a draft model that has tokens the target lacks, and one that lacks tokens the target has."""
    for target in (tiny(dtype=torch.float64), tiny(vocab=400, tokens=400, dtype=torch.float64)):
        drafter = load_draft_model(stranger, target)
        shared = min(300, target.facts.tokens)
        known = range(drafter.vocab) if drafter.d2t_W is None else drafter.d2t_W.tolist()  # none = all of the target's
        assert list(known) == list(range(shared)) and (drafter.d2t_W is None) == (shared == target.facts.vocab)
        prompts = [[5, 6, 7], [target.facts.tokens - 1] * 6, [40, 41]]
        params = SamplingParams(max_new_tokens=24)
        plain = generate(target, prompts, params)
        fast = generate(target, prompts, params, drafter, DecodeConfig(k=3, tree=shape, width=3, nodes=9))
        assert [r.ids for r in fast] == [r.ids for r in plain]


def test_a_draft_model_with_renamed_ids_is_always_right(target: Target, tmp_path: Path) -> None:
    """The target's own model with its rows permuted, and the tokenizer with them: every draft is accepted."""
    order_V = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    twin = tiny_target()
    with torch.no_grad():
        for weight in (twin.model.get_input_embeddings().weight, twin.model.get_output_embeddings().weight):
            weight.copy_(weight[order_V])  # its id i is the target's id order_V[i]
    inner = json.loads(twin.tokenizer.backend_tokenizer.to_str())
    new_of = {int(old): new for new, old in enumerate(order_V)}
    inner["model"]["vocab"] = {token: new_of[i] for token, i in inner["model"]["vocab"].items()}
    for added in inner["added_tokens"]:
        added["id"] = new_of[added["id"]]
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    twin.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(inner)), unk_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    drafter = load_draft_model(save(twin, tmp_path / "twin"), target)
    assert drafter.rows_W is not None and order_V[drafter.rows_W].tolist() == list(range(256))
    params = SamplingParams(max_new_tokens=16)
    plain = generate(target, [[5, 6, 7], [9] * 6], params)
    fast = generate(target, [[5, 6, 7], [9] * 6], params, drafter, DecodeConfig(k=4))
    assert [r.ids for r in fast] == [r.ids for r in plain]
    assert all(a == 1.0 for r in fast for a in r.stats.alpha)


def test_an_ordinary_model_drafts_by_its_name(stranger: str, capsys: Any) -> None:
    """`--model lm:FOLDER`: no export, no training; the report does not tell where the folder lies."""
    from draftsmith.inference.evaluate import evaluate
    from draftsmith.inference.evaluate_config import EvaluateConfig
    from draftsmith.inference.generate import GenerateConfig, run_generate

    run_generate(GenerateConfig(prompt="abc", raw=True, model=f"lm:{stranger}", target="tiny", max_new_tokens=8))
    assert "verify passes" in capsys.readouterr().out
    cfg = EvaluateConfig(f"lm:{stranger}", target="tiny", prompts=2, max_new_tokens=8, k=(2,), hf_prompts=0)
    report = evaluate(cfg.model, cfg)
    (row,) = [r for r in report["rows"] if r["method"] == "draft_model"]
    assert row["name"] == "lm:stranger chain K=2" and str(Path(stranger).parent) not in json.dumps(report)
    with pytest.raises(ValueError, match="add --target NAME"):
        run_generate(GenerateConfig(prompt="abc", model=f"lm:{stranger}"))


@pytest.mark.parametrize("tree", ["chain", "static"])
def test_sampled_law_with_another_vocabulary(tree: str, scripted: Any) -> None:
    """Joint law of two tokens, 16 cells, 20,000 answers: the draft model shares three of the target's four tokens."""
    table_VVV = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.2
    ours = Words(["a▁", "b", "c", "d"], pieces=None)
    target = scripted.Target(lambda before, last, _: table_VVV[before.clamp(min=0), last], 4, tokenizer=ours)
    theirs = Words(["x", "c", "y", "a▁", "b"], pieces=lambda text: [0], unk=0)
    torch.manual_seed(5)
    drafter = DraftModel(DraftModelConfig(LMConfig("random", architecture=LLAMA | {"vocab_size": 5})), target.facts)
    drafter.tokenizer = theirs
    drafter.bind(target)
    assert drafter.d2t_W is not None and drafter.d2t_W.tolist() == [0, 1, 2] and drafter.rows_W.tolist() == [3, 4, 1]  # type: ignore[union-attr]
    target.tokenizer = None  # answers are ids alone
    with torch.no_grad():
        drafter.lm_head.weight.mul_(30)  # far from flat
    params, n = SamplingParams(temperature=1.0, max_new_tokens=3), 20_000
    each = [dataclasses.replace(params, seed=i) for i in range(n)]
    decode = DecodeConfig(k=2, tree=tree, width=2, nodes=4, max_rows=5000)
    results = generate(target, [[1, 2]] * n, each, drafter.eval(), decode)
    law = torch.zeros(4, 4, dtype=torch.float64)
    first_V = table_VVV[1, 2].softmax(-1)
    for a in range(4):
        for b in range(4):
            law[a, b] = first_V[a] * table_VVV[2, a].softmax(-1)[b]
    last_VV = torch.stack([torch.stack([table_VVV[a, b].softmax(-1) for b in range(4)]) for a in range(4)])
    want_VV = torch.einsum("ab,abc->bc", law, last_VV) * n  # tokens 2 and 3, across rounds
    seen_VV = torch.zeros(4, 4, dtype=torch.float64)
    for result in results:
        seen_VV[result.ids[1], result.ids[2]] += 1
    statistic = float(((seen_VV - want_VV) ** 2 / want_VV).sum())
    chance = float(torch.special.gammaincc(torch.tensor(7.5).double(), torch.tensor(statistic / 2).double()))
    assert chance > 1e-3
    assert sum(sum(r.from_draft) for r in results) > n / 10


def test_a_trained_export_must_have_the_targets_vocabulary(stranger: str, target: Target) -> None:
    from draftsmith.inference.exporters import EXPORTERS

    drafter = make(target, {"start": "model", "model": stranger})
    batch = packed_row([(0, 20, 8)])
    assert bool(drafter(batch, states(target, batch), 0.0).losses["depth_1"].isfinite())
    with pytest.raises(ValueError, match="vocabulary of its own"):
        EXPORTERS["draft_model"].pack(drafter, target)


def test_a_draft_vocabulary_of_a_strangers_tokens(stranger: str, target: Target) -> None:
    drafter = make(target, {"start": "model", "model": stranger}, draft_ids=torch.arange(0, 256, 3))
    assert drafter.d2t_W is not None and drafter.d2t_W.tolist() == list(range(0, 256, 3))
    assert drafter.rows_W is not None and drafter.rows_W.tolist() == list(range(0, 256, 3))
