"""`draftsmith generate`: rule and promise printed, drafted tokens marked, settings refused before weights load (B60)."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from draftsmith.inference import generate as command
from draftsmith.inference.commit import Event
from draftsmith.inference.generate import (
    GenerateConfig,
    Painter,
    answer,
    decode_of,
    rule_line,
    run_generate,
    sampling_of,
)
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.inference.verify import VERIFIERS
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.drafter import Level

PROMPT = "What is rain?"


def console(colour=False):
    return Console(
        file=io.StringIO(),
        width=80,
        highlight=False,
        force_terminal=colour,
        color_system="standard" if colour else None,
    )


@pytest.fixture(scope="module")
def target(tiny):
    return tiny()


@pytest.fixture(scope="module")
def drafter(target):
    """An untrained head: right often enough to mix both origins only by luck, so tests that need a mix script it."""
    made = METHODS["medusa"](METHODS["medusa"].Config(), target.facts)
    made.init_from_target(target)
    return made


@pytest.mark.parametrize("rule", VERIFIERS)
def test_every_rule_is_printed_with_its_promise_and_condition(rule):
    line = rule_line(rule, DecodeConfig(fuzzy_threshold=0.25))
    word = "exact" if VERIFIERS[rule].exact else "not exact"
    assert f"{rule} ({word}; {VERIFIERS[rule].condition})" in line
    assert ("not exact" in line) == (rule in ("typical", "fuzzy", "entropy"))
    assert ("fuzzy_threshold=0.25" in line) == (rule == "fuzzy")


def test_a_rule_that_is_not_exact_needs_its_flag():
    for rule, verifier in VERIFIERS.items():
        cfg = GenerateConfig(prompt="x", verifier=rule)
        if verifier.exact:
            decode_of(cfg)
        else:
            with pytest.raises(ValueError, match="allow_lossy"):
                decode_of(cfg)
            decode_of(replace(cfg, allow_lossy=True))


def test_settings_are_refused_before_anything_loads(monkeypatch):
    monkeypatch.setattr(command, "load_target", lambda *a, **k: pytest.fail("loaded"))
    for change, message in (
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"k": 0}, "k=0"),
        ({"k": 10**6}, "k=1000000, at most 4096"),
        ({"nodes": 10**6, "tree": "static"}, "nodes=1000000, at most 4096"),
        ({"fixed_width": 10**6}, "fixed_width=1000000, at most 4096"),
        ({"top_k": 2**63}, "top_k=9223372036854775808"),
        ({"tree": "bush"}, "tree='bush'"),
        ({"tree": "static", "threshold": 0.5}, "threshold is for the trees cut, opt"),
        ({"verifier": "typical"}, "allow_lossy"),
        ({"verifier": "block", "tree": "static"}, "is for chains"),
        ({"verifier": "ratio", "tree": "dynamic"}, "needs the rows q"),
        ({"verifier": "ratio_tree", "tree": "best_first"}, "needs the rows q"),
        ({"verifier": "ratio", "target": "tiny", "model": "lm:some/model"}, "needs the rows q"),  # at temperature 0
        ({"verifier": "greedy", "target": "tiny", "temperature": 1.0}, "temperature 0 only"),
        ({"verifier": "ratio", "target": "tiny", "model": "ngram", "temperature": 1.0}, "needs the rows q"),
        ({"tree": "best_first", "target": "tiny", "model": "ngram"}, "proposes drafts of its own"),
        ({"tree": "ppd", "target": "tiny", "model": "lm:some/model"}, "all depths at once"),
        ({}, "--model EXPORT"),
    ):
        with pytest.raises(ValueError, match=message):
            run_generate(GenerateConfig(prompt="x", **change))


def test_defaults_are_those_of_the_runtime():
    cfg = GenerateConfig(prompt="x")
    assert sampling_of(cfg) == SamplingParams() and decode_of(cfg) == DecodeConfig()


class Half:
    """Drafts the right token at every other verification."""

    method, taps, d2t_W, parallel, max_depth, training = "half", (), None, 1, None, False

    def __init__(self, target, ids, length):
        self.answer = generate(target, [ids], SamplingParams(max_new_tokens=length, ignore_eos=True))[0].ids
        self.facts, self.prompt, self.steps = target.facts, len(ids), 0

    def init(self, prefill):
        return 0

    def start(self, known, commit):
        import torch

        known += int(commit.counts_B[0])
        self.steps += 1
        at = known - self.prompt + 1
        token = self.answer[at] if at < len(self.answer) else 0
        logits_11W = torch.zeros(1, 1, self.facts.vocab)
        logits_11W[..., token if self.steps % 2 else (token + 1) % self.facts.tokens] = 9.0
        return known, Level(logits_11W, torch.ones(1, 1, dtype=torch.bool))


def ids_of(target):
    return command.prompt_ids(target, GenerateConfig(prompt=PROMPT))


@pytest.mark.parametrize("live", [True, False])
def test_printed_text_is_the_answer_with_drafted_tokens_marked(target, live):
    ids, sampling = ids_of(target), SamplingParams(max_new_tokens=16)
    out = console()
    result = answer(target, Half(target, ids, 20), ids, sampling, DecodeConfig(k=1), out, show=True, live=live)
    printed = out.file.getvalue()
    assert any(result.from_draft) and not all(result.from_draft)
    assert printed.count("«") == printed.count("»") > 1
    unmarked = printed.replace("«", "").replace("»", "").rstrip("\n")
    assert unmarked == command.visible(result.text).plain.rstrip("\n")
    marked = "".join(part.split("»")[0] for part in printed.split("«")[1:])
    drafted = [i for i, draft in zip(result.ids, result.from_draft, strict=True) if draft]
    assert (
        len(marked) == len(command.visible("".join(target.tokenizer.decode([i]) for i in drafted)).plain)
        or "\\x" in marked
    )


def test_colours_where_the_terminal_has_them(target):
    ids = ids_of(target)
    out = console(colour=True)
    answer(
        target,
        Half(target, ids, 20),
        ids,
        SamplingParams(max_new_tokens=12),
        DecodeConfig(k=1),
        out,
        show=True,
        live=True,
    )
    assert "\x1b[1;32m" in out.file.getvalue() and "«" not in out.file.getvalue()


def test_text_held_back_or_cut_keeps_its_colours(tokenizer):
    """Events whose text lags behind their ids, or ends before a stop string: marks stay with the right characters."""
    out = console()
    painter = Painter(tokenizer, out, show=True)
    ids = [tokenizer("abcdef").input_ids[i] for i in range(6)]
    painter.paint(Event(0, 0, ids[:3], "a", [False, True, True], None))  # "bc" is held back
    painter.paint(Event(0, 1, ids[3:5], "bcd", [False, True], None))  # "e" is held back
    painter.paint(Event(0, 2, ids[5:], "", [False], "stop_string"))  # "ef" is cut
    painter.close()
    assert out.file.getvalue() == "a«bc»d\n"


def test_control_characters_are_made_visible(tokenizer):
    out = console()
    Painter(tokenizer, out, show=False).paint(Event(0, 0, [5], "\x1b[2Jx", [False], None))
    assert out.file.getvalue() == "\\x1b[2Jx"


def test_the_command_end_to_end(target, drafter, monkeypatch, capsys):
    export = {"draftsmith": {"method": "medusa", "target": {"name": "tiny", "revision": None}, "train_length": 8}}
    asked = SimpleNamespace(target=None)

    def load(name, **options):
        asked.target = name
        return target

    monkeypatch.setattr(command, "load_target", load)
    monkeypatch.setattr(command, "load_drafter", lambda name, target, revision=None: drafter)
    monkeypatch.setattr(command, "stored_denoiser", lambda name, revision=None: None)
    monkeypatch.setattr(command, "stored_consistency", lambda name, revision=None: None)
    monkeypatch.setattr(command, "read_export_config", lambda name, revision=None: export)
    cfg = GenerateConfig(prompt=PROMPT, model="somewhere", max_new_tokens=8, k=2, show=True, dtype="float32")
    run_generate(cfg)
    text = " ".join(capsys.readouterr().out.split())
    assert asked.target == "tiny" and "acceptance rule: greedy (exact; temperature 0)" in text
    assert "verify passes" in text and "tokens/s" in text and "accepted by depth" in text
    assert "the drafter was trained on up to 8" in text and "target run lean, steps: host" in text
    run_generate(GenerateConfig(prompt=PROMPT, target="tiny", max_new_tokens=8, dtype="float32"))
    assert "plain decoding (exact)" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_answer(target, drafter):
    ids, cfg = ids_of(target), GenerateConfig(prompt=PROMPT, temperature=1.0, max_new_tokens=12)
    runs = [
        answer(
            target,
            drafter,
            ids,
            sampling_of(replace(cfg, seed=seed)),
            DecodeConfig(k=2),
            console(),
            show=False,
            live=True,
        )
        for seed in (1, 1, 2)
    ]
    assert runs[0].ids == runs[1].ids != runs[2].ids


def test_prompt_forms(target, monkeypatch):
    ids = command.prompt_ids(target, GenerateConfig(prompt=PROMPT, system="Be brief."))
    assert "Be brief." in target.tokenizer.decode(ids) and PROMPT in target.tokenizer.decode(ids)
    raw = command.prompt_ids(target, GenerateConfig(prompt=PROMPT, raw=True))
    assert target.tokenizer.decode(raw) == PROMPT
    for wrong in ({"prompt": "a\udc80"}, {"prompt": "a\udc80", "raw": True}, {"prompt": "a", "system": "\udcff"}):
        with pytest.raises(ValueError, match="no UTF-8"):
            command.prompt_ids(target, GenerateConfig(**wrong))
    with pytest.raises(ValueError, match="'lm:' names no model"):
        command.free_drafter("lm:", target)
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="--raw"):
        command.prompt_ids(target, GenerateConfig(prompt=PROMPT))
