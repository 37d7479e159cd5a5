"""Train a draft head or drafter from a frozen target: recipe -> states -> training -> export.

    ./launch.sh train/distill_draft.py --config configs/eagle3_smollm2.yaml optim.lr=3e-4
    accelerate launch train/distill_draft.py --config configs/eagle3_smollm2.yaml optim.lr=3e-4

Leaves a run folder: `checkpoints/`, `metrics.jsonl`, `run.yaml` and `export/`, which is what `draftsmith generate`,
`draftsmith evaluate` and serving engines load. Starting it again goes on where it stopped. Exit code 0 when the budget
is used, 143 / 130 after SIGTERM / Ctrl-C (saved), 2 for a wrong request, 1 for a failure.
Tests: `pytest tests/test_train.py tests/test_config.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draftsmith.configs.parse import UsageError, keys_of, nearest, parse, read_recipe, split_tokens
from draftsmith.configs.training import TrainConfig, check
from draftsmith.data.batch import Batch, TargetOut
from draftsmith.data.draft_vocab import choose_draft_ids, count_supervised, coverage
from draftsmith.data.encode import Sample, encode_all, prompt_ids
from draftsmith.data.packing import collate
from draftsmith.data.places import Place, inside, place_of
from draftsmith.data.rolling import open_rolling, reading_order
from draftsmith.data.sources import split_conversations
from draftsmith.data.states import StateStore
from draftsmith.inference.capture import capture, state_fields
from draftsmith.inference.export import export
from draftsmith.inference.exporters import EXPORTERS
from draftsmith.inference.exporters.folder import REPLAY
from draftsmith.inference.load import load_drafter
from draftsmith.inference.speculate import DecodeConfig, generate
from draftsmith.losses.probs import SamplingParams
from draftsmith.models import METHODS
from draftsmith.models.piecewise import refuse_other_states
from draftsmith.models.placement import together
from draftsmith.models.target import Target, live_states
from draftsmith.train import engine
from draftsmith.train.loop import Summary, train
from draftsmith.train.script import (
    claim,
    how_it_ended,
    last_heldout,
    make_stream,
    refuse_other_run,
    run,
    run_facts,
    say_plan,
    silent,
    target_of,
    where_it_is,
    write_run_file,
)
from draftsmith.train.utilisation import flops_per_token

SCRIPT = "distill_draft.py"


def read_config(argv: Sequence[str], prog: str) -> TrainConfig:
    """Two stages: the method's name first, then everything, typed by that method's own Config.

    Raises UsageError or ValueError, one line, before any weights are loaded and with nothing written.
    """
    plain = [a for a in argv if a not in ("--help", "-h", "--print_config", "--print-config")]
    keys: dict[str, Any] = {}
    for one in METHODS.values():
        keys |= keys_of(TrainConfig, {"drafter": one.Config})
    recipes, pairs = split_tokens(plain, (), keys)
    method = None
    for path in recipes:
        recipe = read_recipe(path)
        method = recipe.get("method", method) if isinstance(recipe, dict) else method
    method = dict(pairs).get("method", method)
    if method is None:
        if len(plain) < len(argv):
            print(f"methods: {', '.join(METHODS)}; add method=NAME to see a method's own settings (`drafter.*`)\n")
            method = next(iter(METHODS))
        else:
            raise UsageError(f"no method: give --config RECIPE, or method=NAME with one of {', '.join(METHODS)}")
    if not isinstance(method, str) or method not in METHODS:
        known = ", ".join(METHODS)
        raise UsageError(
            f"unknown method {method!r}; nearest: {nearest(str(method), list(METHODS))!r} (known: {known})"
        )
    sections = {"drafter": METHODS[method].Config}
    config = parse(TrainConfig, argv, prog=prog, sections=sections, description="Train a drafter.")
    check(config)
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """One run, from the command line to the export. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    config = read_config(argv, Path(sys.argv[0]).name)
    folder = engine.run_folder(config)
    refuse_other_run(folder, config)
    accelerator = engine.start(config)
    torch.manual_seed(config.seed)
    say = print if accelerator.is_main_process else silent

    target = target_of(config, accelerator, captured_from(config, folder))
    train_talks, heldout_talks = split_conversations(config.data, config.evaluate.conversations)
    samples, report = encode_all(train_talks, target.tokenizer, config.data.max_length)
    heldout_samples = encode_all(heldout_talks, target.tokenizer, config.data.max_length)[0] if heldout_talks else []
    say(f"target {target.facts.name}, {where_it_is(target)}; training data: {report}; held out: {len(heldout_samples)}")

    drafter, covered = build_drafter(config, target, samples)
    EXPORTERS[config.method].pack(drafter, target)  # what its export can't express is refused now, not after training
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    say(
        f"{config.method}: {trained / 1e6:.1f} M trained parameters; draft vocabulary {draft_vocab_text(drafter, covered)}"
    )

    claim(folder, accelerator)
    say_plan(config, target, samples, accelerator, say)
    if accelerator.is_main_process:
        write_run_file(folder, config, SCRIPT, argv, accelerator, samples, report, target)
    accelerator.wait_for_everyone()
    try:
        samples, states_of, store = states(config, target, drafter, samples, folder, "train", accelerator)
        heldout_samples, heldout_states_of, _ = states(
            config, target, drafter, heldout_samples, folder, "heldout", accelerator
        )
    except ValueError as error:
        raise ValueError(f"{error}{held_out_otherwise(config, folder, len(heldout_samples))}") from error
    stream = make_stream(config, samples, accelerator, store)
    absent = target.placement == "absent"
    if absent and heldout_talks:
        say("no probe: it decodes with the target, whose layers are absent")
    prompts = [prompt_ids(t.messages[:-1], target.tokenizer) for t in heldout_talks[: config.evaluate.probe_prompts]]
    heldout = [collate([sample], config.seed) for sample in heldout_samples]

    summary = train(
        config,
        accelerator,
        drafter,
        stream,
        states_of,
        folder,
        heldout=heldout,
        heldout_states_of=heldout_states_of,
        probe=speculative_probe(target, prompts, config) if prompts and not absent else None,
        together=partial(together, target),
        flops_per_token=flops_per_token(config, target, stream, accelerator, say),
    )
    code = how_it_ended(config, summary, say)
    if code is not None:
        return code
    with together(target):
        if accelerator.is_main_process and hasattr(drafter, "calibrate"):  # drafters that foresee their own acceptance
            drafter.calibrate(heldout, heldout_states_of)
    if accelerator.is_main_process:
        place = write_export(drafter, target, folder, config, argv, samples, summary)
        if not (place / REPLAY).exists():
            say("the export has no replay for `draftsmith check`: it is made with the target whole in one process")
        say(f"export: {place}\nnext: draftsmith evaluate --model {place}")
    accelerator.wait_for_everyone()
    return 0


def build_drafter(config: TrainConfig, target: Target, samples: Sequence[Sample]) -> tuple[Any, float]:
    """The drafter in fp32, started from the target or from a head, and the share of supervised tokens it can say."""
    counts_V = count_supervised(samples, target.facts.vocab)
    if config.init_from is not None:
        head: Any = load_drafter(config.init_from, target)
        if head.method != config.method:
            raise ValueError(
                f"init_from={config.init_from!r} is a {head.method} head, the recipe trains {config.method}"
            )
        if config.draft_vocab is not None and (head.d2t_W is None or len(head.d2t_W) != config.draft_vocab):
            has = "all tokens" if head.d2t_W is None else f"{len(head.d2t_W)} rows"
            raise ValueError(
                f"draft_vocab={config.draft_vocab}, but the head in init_from keeps its own mapping ({has})"
            )
        drafter: Any = METHODS[config.method](config.drafter, target.facts, head.d2t_W)  # as the recipe says
        drafter.init_from_target(target)
        try:
            drafter.load_state_dict(head.float().state_dict())
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"init_from={config.init_from!r} was built by other `drafter` settings: {reason}"
            ) from error
        drafter = drafter.float()
        return drafter, coverage(counts_V, drafter.d2t_W)
    draft_ids_W = None
    if config.draft_vocab is not None:
        facts = target.facts
        draft_ids_W = choose_draft_ids(counts_V, config.draft_vocab, always=facts.eos_ids, allowed=facts.tokens)
    drafter = METHODS[config.method](config.drafter, target.facts, draft_ids_W)
    drafter.init_from_target(target)
    return drafter.float(), coverage(counts_V, draft_ids_W)


def states_place(config: TrainConfig, folder: Path) -> Place:
    """Where captured states are."""
    return place_of(config.states.folder or folder / "states", config.states.cache, config.states.cache_gb)


def captured_from(config: TrainConfig, folder: Path) -> str | None:
    """The fingerprint of the target that states were captured from, where they must say it: no layers, no fingerprint."""
    if config.target.placement != "absent":
        return None
    try:
        store = StateStore(inside(states_place(config, folder), "train"))
    except ValueError as error:
        raise ValueError(
            f"target.placement=absent reads states captured before: {error}; name their folder, which holds `train` and "
            "`heldout`, in states.folder"
        ) from None
    rounded, _, known_by = store.fields.target.rpartition(":")
    if rounded:
        raise ValueError(f"states of a target rounded to {rounded} are read with target.quantize={rounded} alone")
    return known_by


def held_out_otherwise(config: TrainConfig, folder: Path, here: int) -> str:
    """What a refusal of captured states adds where their capture held out another number of samples, so that those of the
    source have other numbers; empty where it did not."""
    place = inside(states_place(config, folder), "heldout")
    if "index.json" in place.sizes():
        there = StateStore(place).samples
    elif config.target.placement == "absent":
        there = 0
    else:  # not captured before: this training does it
        return ""
    asked = config.evaluate.conversations
    return "" if there == here else (
        f"; the capture held out {there} samples, evaluate.conversations={asked} holds out {here}: capture with "
        f"--heldout {asked}, or give evaluate.conversations as it was"
    )  # fmt: skip


def states(
    config: TrainConfig,
    target: Target,
    drafter: Any,
    samples: list[Sample],
    folder: Path,
    split: str,
    accelerator: Accelerator,
) -> tuple[list[Sample], Callable[[Batch], TargetOut], StateStore | None]:
    """The usable samples, a function that gives the target's states of a batch of them, and where they are stored."""
    if drafter.loss_needs <= {"ids"}:  # the text is all: no pass of the target, nothing to capture
        return samples, lambda batch: TargetOut(head=target.head, by_head=target.by_head, embed=target.embed), None
    if config.states.source == "captured" and samples:
        last_hidden, top_k = config.states.keeps(drafter.loss_needs, getattr(drafter.config, "objective", ""))
        kept = (last_hidden, config.states.stored, config.states.last_stored, top_k)
        place = states_place(config, folder)
        if config.states.rolling and split == "train":
            samples = reading_order(samples, config.seed)
            fields = state_fields(target, samples, drafter.taps, *kept)
            store = open_rolling(inside(place, split), fields, samples, accelerator.is_main_process)
        elif target.placement == "absent":
            fields = state_fields(target, samples, drafter.taps, *kept)
            store = StateStore(inside(place, split), fields, drafter.taps, last_hidden, samples, top_k)
            refuse_other_states(target, store, samples)
        else:
            store = capture(
                target,
                samples,
                inside(place, split),
                taps=drafter.taps,
                need_last_hidden=last_hidden,
                batch_tokens=config.states.batch_tokens,
                progress=accelerator.is_main_process,
                stored=config.states.stored,
                last_stored=config.states.last_stored,
                top_k=top_k,
                verify=config.states.verify,
                rank=accelerator.process_index,
                world=accelerator.num_processes,
            )

        def stored(batch: Batch) -> TargetOut:
            return dataclasses.replace(store.fill(batch), head=target.head, by_head=target.by_head, embed=target.embed)

        return store.usable(samples), stored, store

    return samples, partial(live_states, target, drafter), None


def speculative_probe(
    target: Target, prompts: list[list[int]], config: TrainConfig
) -> Callable[[Any, Callable[[], bool]], dict[str, float]]:
    """A real greedy speculative run on held-out prompts, in the dtype of the export: committed tokens per verification."""
    params = SamplingParams(max_new_tokens=config.evaluate.probe_tokens)

    def probe(drafter: Any, stopped: Callable[[], bool]) -> dict[str, float]:
        served = copy.deepcopy(drafter, {id(target): target}).to(target.dtype).eval().requires_grad_(False)
        served.bind(target)
        k = min(config.evaluate.probe_k, drafter.max_depth or config.evaluate.probe_k)
        committed, verifies = 0, 0
        for ids in prompts:
            if stopped():
                return {}
            (result,) = generate(target, [ids], params, drafter=served, decode=DecodeConfig(k=k))
            committed += result.stats.committed - 1  # the first token comes from the prompt's own pass
            verifies += result.stats.verifies
        return {"tau": committed / verifies, "k": k, "verifies": verifies} if verifies else {}

    return probe


def write_export(
    drafter: Any,
    target: Target,
    folder: Path,
    config: TrainConfig,
    argv: Sequence[str],
    samples: Sequence[Sample],
    summary: Summary,
) -> Path:
    """`export/` of the run, with what training estimated for `draftsmith evaluate` to be held against."""
    heldout = summary.heldout or last_heldout(folder)
    # `accuracy_d` counts agreement with the target's own choice where all tokens before are the data's; for heads that
    # do not see those (Medusa, parallel drafters) that is below the acceptance after accepted ones.
    depths = sorted(int(name.removeprefix("accuracy_")) for name in heldout if name.startswith("accuracy_"))
    alpha = [heldout[f"accuracy_{depth}"] for depth in depths]
    estimated = {"k": len(alpha), "tau": heldout["tau"], "alpha": alpha} if "tau" in heldout else None
    facts = run_facts(config, SCRIPT, argv, samples, summary, heldout)
    facts = dataclasses.replace(facts, estimated=estimated)
    return export(drafter, folder / "export", run=facts, target=target)


def draft_vocab_text(drafter: Any, covered: float) -> str:
    rows = "all tokens" if drafter.d2t_W is None else f"{len(drafter.d2t_W)} rows"
    return f"{rows}, covers {covered:.2%} of the supervised tokens"


if __name__ == "__main__":
    run(main)
