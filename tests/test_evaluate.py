"""`evaluate` on a tiny target with scripted drafters whose acceptance is known (CASES B41, B56; PROMISES 1, 6, 17, 26)."""

import io
import json
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from draftsmith.inference import evaluate as evaluation
from draftsmith.inference.evaluate import measure, plan, run_evaluate, write_report
from draftsmith.inference.evaluate_config import EvaluateConfig
from draftsmith.inference.export import export
from draftsmith.inference.exporters.layout import RunFacts
from draftsmith.inference.report import html, print_report
from draftsmith.inference.speculate import generate
from draftsmith.inference.suites import Prompt
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.drafter import Level
from draftsmith.models.tree import Prompts

FIELDS = [  # of every row, as promised to readers of the JSON
    *(
        "name",
        "method",
        "decode",
        "draft_length",
        "tree",
        "temperature",
        "dtype",
        "prompts",
        "tau",
        "tau_macro",
        "alpha",
    ),
    *(
        "tokens_per_second",
        "ratio_to_plain",
        "ratio_to_hf",
        "identical_to_plain",
        "lossless",
        "tokens_per_forward",
        "quality",
        "by_prompt",
    ),
]
PROMPTS = [
    Prompt(f"p{i}", "chat" if i % 2 else "code", ({"role": "user", "content": text},))
    for i, text in enumerate(["Hello there", "Write a loop", "Why is it so", "Add 3 and 4", "Once upon", "Sort a list"])
]


class Scripted:
    """A drafter that knows the target's greedy answers and errs by script: `right(step, depth) -> bool`."""

    method, taps, d2t_W, parallel, max_depth = "scripted", (), None, 1, None
    draft_needs = loss_needs = frozenset({"ids"})
    training = False
    answers: dict = {}  # noqa: RUF012 -- shared: one target, the same prompts

    def __init__(self, target, right=lambda step, depth: True, sleep=0.0, tokens=76):
        self.target, self.right, self.sleep, self.tokens = target, right, sleep, tokens
        self.facts, self.steps = target.facts, 0

    def state_dict(self):
        return {"w": torch.zeros(1)}

    def learn(self, prompt):
        """The target's answer; asked for ahead of the run, so that it costs no time in it."""
        if tuple(prompt) not in self.answers:
            params = SamplingParams(max_new_tokens=self.tokens, ignore_eos=True)
            self.answers[tuple(prompt)] = generate(self.target, [prompt], params)[0].ids
        return self.answers[tuple(prompt)]

    def init(self, prefill):
        return None

    def reset(self, state, rows):
        return state

    def start(self, state, commit):
        n = int(commit.counts_B[0])
        known = [] if state is None else state["known"]
        known = known + commit.ids_BT[0, :n].tolist()
        if state is None:
            state = {"prompt": len(known), "answer": self.learn(known), "known": known}
        state = {**state, "known": known, "depth": 1}
        time.sleep(self.sleep)
        self.steps += 1
        return state, self._level(state)

    def extend(self, state, tokens_BN, parents_BN):
        state = {**state, "depth": state["depth"] + 1}
        return state, self._level(state, tokens_BN.shape[1])

    def _level(self, state, n=1):
        at = len(state["known"]) - state["prompt"] + state["depth"]
        token = state["answer"][at] if at < len(state["answer"]) else 0
        if not self.right(self.steps, state["depth"]):
            token = (token + 1) % self.facts.tokens
        logits_1NW = torch.zeros(1, n, self.facts.vocab)
        logits_1NW[..., token] = 9.0
        return Level(logits_1NW, torch.ones(1, n, dtype=torch.bool))


def config(tmp_path, **change):
    base = EvaluateConfig(
        model="unused",
        max_new_tokens=24,
        k=(2,),
        dtype="float64",
        bootstrap=100,
        out=str(tmp_path / "out"),
        hf_prompts=0,
    )
    return replace(base, **change)


@pytest.fixture(scope="module")
def target(tiny):
    return tiny(dtype=torch.float64)


def run(target, drafters, cfg, prompts=PROMPTS, estimated=None):
    quiet = Console(quiet=True)
    for drafter in drafters.values():
        for prompt in prompts:
            drafter.learn(
                target.tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
            )
    return measure(target, drafters, prompts, cfg, estimated, quiet)


def row_of(report, name):
    return next(row for row in report["rows"] if row["name"] == name)


def test_conditional_and_unconditional_acceptance_of_a_scripted_drafter(target, tmp_path):
    """Right at depth 1 always, at depth 2 every other time: 1.00 and 0.50 conditional, 0.50 unconditional."""
    drafter = Scripted(target, right=lambda step, depth: depth == 1 or step % 2 == 0)
    report = run(target, {"scripted": drafter}, config(tmp_path, max_new_tokens=72))
    row = row_of(report, "scripted chain K=2")
    assert row["alpha"] == pytest.approx([1.0, 0.5], abs=0.02)
    assert row["alpha_unconditional"] == pytest.approx([1.0, 0.5], abs=0.03)
    assert row["tau"] == pytest.approx(2.5, abs=0.1) and row["lossless"] == "exact"
    offered = [tried for _, tried in row["alpha_counts"]]
    assert offered[0] > 100 and row["verifications"] >= offered[0]
    assert row["identical_to_plain"] is True and row["checked_prompts"] == len(PROMPTS) and row["red"] is None
    text = terminal(report)
    assert "conditional" in text and "unconditional" in text and "1.00" in text and "50" in text


def terminal(report):
    console = Console(width=200, file=io.StringIO())
    print_report(report, console)
    return console.file.getvalue()


def test_a_slow_drafter_is_flagged(target, tmp_path):
    """High acceptance, and still slower than plain decoding: shown as a ratio below 1, and said."""
    report = run(target, {"scripted": Scripted(target, sleep=0.05)}, config(tmp_path))
    row = row_of(report, "scripted chain K=2")
    assert row["tau"] > 2 and row["ratio_to_plain"] < 1 and row["red"] is None
    assert any("slower than plain" in flag for flag in report["flags"])
    assert row["seconds_per_pass"]["draft"] > 0.05 and report["limits"].startswith("draft cost")
    assert "slower than plain" in terminal(report)


def test_always_wrong_and_always_right(target, tmp_path):
    report = run(
        target, {"wrong": Scripted(target, right=lambda s, d: False), "right": Scripted(target)}, config(tmp_path)
    )
    wrong, right = row_of(report, "wrong chain K=2"), row_of(report, "right chain K=2")
    assert wrong["tau"] == 1.0 and wrong["alpha"][0] == 0 and wrong["identical_to_plain"]
    assert right["alpha"] == [1.0, 1.0] and right["tau"] > 2.7 and right["identical_to_plain"]
    assert [text for text in report["alarms"] if text.startswith("wrong")] and len(report["causes"]) == 6
    assert report["best"] == "right chain K=2"


def test_alarm_against_what_training_estimated(target, tmp_path):
    drafter = Scripted(target, right=lambda step, depth: depth == 1 and step % 2 == 0)
    estimated = {"scripted": {"k": 2, "tau": 2.6, "alpha": [0.9, 0.8]}}
    report = run(target, {"scripted": drafter}, config(tmp_path), estimated=estimated)
    assert "2.60 that training estimated" in report["alarms"][0]
    assert report["gains"]["alignment"] == pytest.approx(2.6 / report["rows"][-1]["tau"] - 1)
    assert "the usual causes" in terminal(report)


def test_json_has_the_fields_that_others_read(target, tmp_path):
    cfg = config(tmp_path, hf_prompts=2, k=(1, 2), trees=("chain", "static"), max_new_tokens=8)
    report = run(target, {"scripted": Scripted(target)}, cfg, PROMPTS[:3])
    json_path, html_path = write_report(report, cfg)
    stored = json.loads(json_path.read_text())
    for row in stored["rows"]:
        assert set(FIELDS) <= set(row)
    names = [row["name"] for row in stored["rows"]]
    assert names == [
        "plain",
        "transformers",
        "plain, width 2",
        "plain, width 3",
        *[f"scripted {tree} K={k}" for tree in ("chain", "static") for k in (1, 2)],
    ]
    plain = row_of(stored, "plain")
    assert plain["tau"] == 1.0 and plain["ratio_to_plain"] == 1.0 and plain["tokens_per_forward"] == 1.0
    assert row_of(stored, "transformers")["prompts"] == 2 and row_of(stored, "transformers")["identical_prompts"] == 2
    draft = row_of(stored, "scripted chain K=2")
    parts = {name: sum(p[name] for p in draft["by_prompt"].values()) for name in draft["by_prompt"]["p0"]}
    assert len(draft["by_prompt"]) == 3 and parts["tokens"] == draft["tokens"]
    assert parts["tokens"] / parts["seconds"] == pytest.approx(draft["tokens_per_second"])
    assert parts["verified_tokens"] / parts["verifications"] == pytest.approx(draft["tau"])
    assert draft["ratio_to_hf"] is not None and draft["tokens_per_forward"] >= 2 and draft["quality"] is None
    assert {"cpu", "torch", "transformers", "threads", "git"} <= set(stored["machine"])
    assert stored["run"]["seed"] == 0 and not json_path.with_suffix(".partial.jsonl").exists()
    assert html_path.read_text() == html(stored)


def test_trees_are_compared_with_plain_decoding(target, tmp_path):
    cfg = config(tmp_path, trees=("static", "dynamic"), max_new_tokens=12)
    drafter = Scripted(target, right=lambda step, depth: step % 3 > 0)
    report = run(target, {"scripted": drafter}, cfg)
    for tree in ("static", "dynamic"):
        row = row_of(report, f"scripted {tree} K=2")
        assert row["identical_to_plain"] is True and row["checked_prompts"] == len(PROMPTS) and not row["divergences"]
        assert len(row["alpha_by_rank"][0]) >= 1


def test_arms_are_those_that_a_drafter_can_grow(target, tmp_path):
    """Level by level it has no marginals; chains that are cut are compared at equal width too; a prefix has no width."""
    drafter = Scripted(target)
    cfg = config(tmp_path, trees=("chain", "cut", "opt", "best_first"), threshold=0.4, nodes=7, k=(2, 3))
    arms = plan(cfg, {"s": drafter})
    assert [arm.name for arm in arms if arm.kind == "draft"] == [
        f"s {tree} K={k}" for tree in ("chain", "cut", "opt") for k in (2, 3)
    ]
    assert {(arm.decode.tree, arm.decode.threshold) for arm in arms if arm.kind == "draft"} == {
        ("chain", None), ("cut", 0.4), ("opt", 0.4)
    }  # fmt: skip
    assert [arm.decode.fixed_width for arm in arms if arm.kind == "width"] == [3, 4]
    assert all(arm.decode.nodes == 7 for arm in arms if arm.kind == "draft")
    report = run(target, {"s": drafter}, replace(cfg, k=(2,), max_new_tokens=8))
    assert row_of(report, "s cut K=2")["identical_to_plain"] and row_of(report, "s opt K=2")["identical_to_plain"]
    with pytest.raises(ValueError, match="no drafter gives what they need; add chain"):
        plan(replace(cfg, trees=("best_first",), threshold=None), {"s": drafter})
    drafter.prompts = Prompts(2)
    widths = [arm.decode.fixed_width for arm in plan(cfg, {"s": drafter}) if arm.kind == "width"]
    assert widths == [3 + 3 * 2, 4 + 4 * 2]
    drafter.prefix_kv = torch.zeros(4, 2, 4, 1, 12)
    assert not [arm for arm in plan(cfg, {"s": drafter}) if arm.decode.fixed_width]


def test_a_red_check_hides_the_speed(target, tmp_path, monkeypatch):
    """A runtime that commits a wrong token: red, no speed anywhere, exit code 1 by the command's rule."""
    real = evaluation.generate

    def faulty(target, prompts, params, drafter=None, decode=None):
        (result,) = real(target, prompts, params, drafter=drafter, decode=decode)
        if drafter is not None and len(result.ids) > 3:
            ids = [*result.ids]
            ids[3] = (ids[3] + 1) % 200
            return [replace(result, ids=ids)]
        return [result]

    monkeypatch.setattr(evaluation, "generate", faulty)
    report = run(target, {"scripted": Scripted(target)}, config(tmp_path, trees=("chain", "static"), max_new_tokens=8))
    chain, tree = row_of(report, "scripted chain K=2"), row_of(report, "scripted static K=2")
    assert "differ from plain decoding at the same width" in chain["red"] and "without a near-tie" in tree["red"]
    for row in (chain, tree):
        assert row["tokens_per_second"] is row["ratio_to_plain"] is row["ratio_to_hf"] is None
    assert report["best"] is None and "red" in terminal(report)
    assert chain["divergences"][0]["position"] == 3 and not chain["divergences"][0]["excused"]


def test_an_interrupted_run_goes_on_where_it_stopped(target, tmp_path, monkeypatch):
    cfg = config(tmp_path, max_new_tokens=6)
    real, calls = evaluation._answer, []

    def counting(target, drafters, arm, ids, params):
        calls.append(arm.name)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return real(target, drafters, arm, ids, params)

    monkeypatch.setattr(evaluation, "_answer", counting)
    drafters = {"scripted": Scripted(target)}
    arms = len(plan(cfg, drafters))
    with pytest.raises(KeyboardInterrupt):
        run(target, drafters, cfg)
    partial = tmp_path / "out" / "report.partial.jsonl"
    assert len(partial.read_text().splitlines()) == 1 + 8 - arms
    with partial.open("a") as file:
        file.write('{"prompt": "p')  # a line that was being written
    calls[:] = ["x"] * 100
    report = run(target, drafters, cfg)
    assert len(calls) - 100 == arms + arms * len(PROMPTS) - (8 - arms)
    assert row_of(report, "plain")["prompts"] == len(PROMPTS)
    calls[:] = ["x"] * 100
    run(target, drafters, replace(cfg, max_new_tokens=5))  # other settings: from the start
    assert len(calls) - 100 == arms + arms * len(PROMPTS)


def test_order_rotates_and_warm_up_uses_no_prompt_of_the_suite(target, tmp_path, monkeypatch):
    real, calls = evaluation._answer, []

    def noting(target, drafters, arm, ids, params):
        calls.append((arm.name, tuple(ids)))
        return real(target, drafters, arm, ids, params)

    monkeypatch.setattr(evaluation, "_answer", noting)
    cfg, drafters = config(tmp_path, max_new_tokens=3), {"scripted": Scripted(target)}
    arms = [arm.name for arm in plan(cfg, drafters)]
    run(target, drafters, cfg)
    warm, timed = calls[: len(arms)], calls[len(arms) :]
    assert [name for name, _ in warm] == arms and not {ids for _, ids in warm} & {ids for _, ids in timed}
    firsts = [timed[i * len(arms)][0] for i in range(len(PROMPTS))]
    assert firsts == [arms[i % len(arms)] for i in range(len(PROMPTS))]


def test_two_turns_share_one_history(target, tmp_path, monkeypatch):
    real, calls = evaluation._answer, []

    def noting(target, drafters, arm, ids, params):
        calls.append((arm.name, tuple(ids)))
        return real(target, drafters, arm, ids, params)

    monkeypatch.setattr(evaluation, "_answer", noting)
    prompt = replace(PROMPTS[0], follow_ups=("And then?",))
    report = run(target, {"s": Scripted(target)}, config(tmp_path, max_new_tokens=6), [prompt])
    turns = {ids for _, ids in calls[len(report["rows"]) :]}
    assert len(turns) == 2 and report["run"]["turns"] == 2
    longer = max(turns, key=len)
    assert "And then?" in target.tokenizer.decode(longer)


def test_sampling_rows_and_lossy_rules(target, tmp_path):
    cfg = config(tmp_path, temperatures=(0.0, 1.0), max_new_tokens=8, hf_prompts=1)
    report = run(target, {"s": Scripted(target)}, cfg, PROMPTS[:2])
    hot = row_of(report, "s chain K=2 T=1")
    assert hot["temperature"] == 1.0 and hot["lossless"] == "exact" and hot["identical_to_plain"] is None
    assert hot["verifier"] not in (None, "greedy") and row_of(report, "plain T=1")["tau"] == 1.0
    with pytest.raises(ValueError, match="allow_lossy"):
        run(target, {"s": Scripted(target)}, replace(cfg, verifier="typical"))
    for rule, setting in (("typical", "typical_delta=0.3"), ("fuzzy", "fuzzy_threshold=0.2"), ("entropy", "0.1")):
        lossy = replace(cfg, verifier=rule, allow_lossy=True, temperatures=(1.0,), fuzzy_threshold=0.2)
        report = run(target, {"s": Scripted(target)}, lossy, PROMPTS[:2])
        assert row_of(report, "s chain K=2 T=1")["lossless"] == "no"
        (flag,) = (flag for flag in report["flags"] if "changes the target's distribution" in flag)
        assert rule in flag and setting in flag


def test_quality_of_scored_suites(target, tmp_path):
    prompts = [replace(p, reference="7") for p in PROMPTS[:2]]
    report = run(target, {"s": Scripted(target)}, config(tmp_path, suite="gsm8k", max_new_tokens=4), prompts)
    assert row_of(report, "plain")["quality"] in (0.0, 0.5, 1.0)
    assert row_of(report, "s chain K=2")["quality"] == row_of(report, "plain")["quality"]


def test_the_command_on_an_export(tiny, tmp_path, capsys):
    """From an export folder to table, JSON, page and model card."""
    target = tiny()
    drafter = METHODS["medusa"](METHODS["medusa"].Config(), target.facts)
    drafter.init_from_target(target)
    estimated = {"k": 2, "tau": 1.9, "alpha": [0.6, 0.5]}
    folder = export(drafter, tmp_path / "export", run=RunFacts(train_length=512, estimated=estimated), target=target)
    cfg = EvaluateConfig(
        model=str(folder), prompts=2, max_new_tokens=4, k=(2,), hf_prompts=1, dtype="float32", out=str(tmp_path / "out")
    )
    assert run_evaluate(cfg) == 0
    text = capsys.readouterr().out
    assert "medusa chain K=2" in text and "ALARM" in text and "what limits you" in text
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert stored["run"]["exports"] == {"medusa": tmp_path.name} and stored["run"]["target"] == "tiny"
    assert stored["run"]["runner"] == "lean" and "run lean, steps: host" in " ".join(text.split())
    assert {row["step"] for row in stored["rows"]} == {"host", None}  # transformers' own loop has none
    assert str(tmp_path) not in json.dumps(stored) and (folder / "report.html").exists()
    card = (folder / "README.md").read_text()
    assert "The target was run lean; steps: host." in card
    assert "| speculate, chain | 2 |" in card and "Estimated at the end" not in card
    assert measured_beside(cfg, folder)["run"]["exports"] == {
        "medusa": tmp_path.name,
        f"medusa {tmp_path.name}": tmp_path.name,
    }


def measured_beside(cfg, folder):
    return evaluation.evaluate(cfg.model, replace(cfg, also=(str(folder),), prompts=1), Console(quiet=True))


def test_bad_settings_are_refused():
    for change, message in (
        ({"suite": "mmlu"}, "suite = 'mmlu'"),
        ({"k": ()}, "k = "),
        ({"k": (0,)}, "k = "),
        ({"prompts": 0}, "prompts = 0"),
        ({"identity_prompts": 0}, "identity_prompts = 0"),
        ({"temperatures": (-1.0,)}, "temperatures"),
        ({"json": "."}, "json = '.' is a folder"),
        ({"trees": ()}, "trees = "),
        ({"trees": ("bush",)}, "tree='bush'"),
        ({"threshold": 0.5, "trees": ("chain", "static")}, "threshold = 0.5: none of trees"),
        ({"threshold": 2.0, "trees": ("chain", "cut")}, "threshold=2.0"),
        ({"prompt_rows": 0}, "prompt_rows=0"),
        ({"hf_prompts": -1}, "hf_prompts = -1"),
        ({"seed": -1}, "seed = -1"),
    ):
        with pytest.raises(ValueError, match=message):
            EvaluateConfig(model="x", **change)
