"""`/metrics` of the server, in Prometheus' text format. Part of inference/server.py. Tests: tests/test_serve.py."""

from __future__ import annotations

from .worker import Worker


def metrics_text(worker: Worker) -> str:
    """Counters since the start, and what is going on now."""
    counts, stats, engine = worker.counts, worker.counts.stats, worker.engine
    lines: list[str] = []

    def put(name: str, kind: str, about: str, values: dict[str, float]) -> None:
        lines.extend([f"# HELP draftsmith_{name} {about}", f"# TYPE draftsmith_{name} {kind}"])
        lines.extend(f"draftsmith_{name}{label} {value}" for label, value in values.items())

    outcomes: dict[str, float] = {f'{{outcome="{name}"}}': count for name, count in counts.outcomes.items()}
    put("requests_total", "counter", "Answers by outcome.", outcomes)
    put("requests_running", "gauge", "Answers that have a row.", {"": engine.running})
    put("requests_waiting", "gauge", "Answers that wait for a row.", {"": len(engine.waiting)})
    put("prompt_tokens_total", "counter", "Tokens of prompts of finished answers.", {"": stats.prompt_tokens})
    put("prompt_tokens_reused_total", "counter", "Those known from earlier requests.", {"": stats.reused})
    prefixes = engine.prefixes
    put("prefix_hits_total", "counter", "Prompts that began as an earlier one.", {"": prefixes.hits if prefixes else 0})
    put("prefix_bytes", "gauge", "Memory of kept prefixes.", {"": prefixes.bytes if prefixes else 0})
    put("generated_tokens_total", "counter", "Tokens of finished answers.", {"": stats.committed})
    put("verifications_total", "counter", "Verifications of finished answers.", {"": stats.verifies})
    put("draft_tokens_total", "counter", "Tokens drafted for finished answers.", {"": stats.drafted})
    put("accepted_tokens_total", "counter", "Drafted tokens that were kept.", {"": stats.from_draft})
    stages: dict[str, float] = {f'{{stage="{name}"}}': round(spent, 6) for name, spent in stats.seconds.items()}
    put("stage_seconds_total", "counter", "Time of finished answers, shared evenly by a batch.", stages)
    put("first_token_seconds_sum", "counter", "From arrival to the first token.", {"": counts.first_token_seconds})
    put("first_token_seconds_count", "counter", "Requests with a first token.", {"": counts.first_tokens})
    put("request_seconds_sum", "counter", "From arrival to the end of finished requests.", {"": counts.seconds})
    return "\n".join(lines) + "\n"
