"""`draftsmith push EXPORT user/name`: upload an export to the Hugging Face Hub.

Only files that belong to an export are sent, after the same strict reading that loading does, and after a scan for
secrets and local paths. The token is the one huggingface_hub finds by itself (HF_TOKEN or `hf auth login`); it is
never read, printed or stored here.

Tests: tests/test_push.py, against a fake Hub on the loopback interface.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .card import HUB_ID, leaks, write_card
from .consistency_folder import stored_consistency, verify_consistency
from .decision_folder import FOLDER, read_heads
from .denoisers import stored_denoiser, verify_denoiser
from .exporters.folder import CARD, CONFIG, REPLAY, REPORT, RUN, WEIGHTS
from .load import read_export_config, verify_folder

FILES = (CONFIG, WEIGHTS, CARD, RUN, REPLAY, REPORT, "report.html")
MERGED_FILES = ("merge.json", "generation_config.json")  # of whole models, beside FILES and their base's tokenizer:
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "chat_template.jinja")  # fmt: skip
SETTINGS = "tokenizer_config.json"
TEXT = (".json", ".yaml", ".md", ".html")
OVERRIDING = re.compile(r"eagle-|eagle3|dflash|dspark", re.IGNORECASE)


@dataclass(frozen=True)
class PushConfig:
    """Upload an export to the Hub.

    Args:
        export: the export folder.
        repo: where to, as user/name.
        private: create the repository as a private one.
        message: the commit's message.
    """

    export: str
    repo: str
    private: bool = False
    message: str = "Upload export"


def refuse_misleading_name(name: str, method: str) -> None:
    """vLLM reads method words in a draft's path and lets them override what it was told, unless the method is one
    of its own EAGLE or DFlash kinds; a Medusa head in such a path is loaded as something else."""
    if method not in ("eagle", "eagle3", "peagle", "dflash", "dspark") and (found := OVERRIDING.search(name)):
        raise ValueError(
            f"{name!r} contains {found[0]!r}: vLLM would load a {method} head there as another method; choose a name "
            "without eagle-, eagle3, dflash and dspark"
        )


def stage(export: Path, repo: str, folder: Path) -> list[Path]:
    """Copy what belongs to an export into `folder`, its card naming `repo`, and refuse anything that must stay home.

    Returns:
        The files, relative to `folder`.
    """
    files: tuple[str, ...] = FILES
    if (stored := stored_denoiser(str(export))) is not None:
        verify_denoiser(stored)
        files += MERGED_FILES + TOKENIZER_FILES
        if stored.kind == "adapters" and (export / FOLDER).is_dir():
            read_heads(export)
            files += tuple(f"{FOLDER}/{name}" for name in (CONFIG, WEIGHTS, RUN))
    elif (model := stored_consistency(str(export))) is not None:
        verify_consistency(model)
        files += MERGED_FILES + TOKENIZER_FILES
    else:
        config = read_export_config(str(export))
        refuse_misleading_name(repo, config["draftsmith"]["method"])
        verify_folder(export)
    sent = []
    for name in files:
        if (source := export / name).is_file() and not source.is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
            sent.append(Path(name))
    write_card(folder, draft=repo)
    if CARD not in map(str, sent):
        sent.append(Path(CARD))
    for path in sent:
        # A vocabulary spells everything; the tokenizer's settings do not.
        ours = path.suffix in TEXT and (path.name == SETTINGS or path.name not in TOKENIZER_FILES)
        text = (folder / path).read_text(encoding="utf-8") if ours else ""
        if found := leaks(text):
            raise ValueError(
                f"{export / path} holds what must not be published ({'; '.join(found[:5])}); remove it there and push again"
            )
    return sent


def run_push(cfg: PushConfig) -> None:
    """Verify, stage, upload; prints what was sent and where it is."""
    if not HUB_ID.fullmatch(cfg.repo):
        raise ValueError(f"repository {cfg.repo!r}: needed user/name, letters, digits, '-', '_' and '.' only")
    with tempfile.TemporaryDirectory(prefix="draftsmith-push-") as place:
        folder = Path(place)
        sent = stage(Path(cfg.export), cfg.repo, folder)
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

        api = huggingface_hub.HfApi(library_name="draftsmith")
        try:
            api.create_repo(cfg.repo, private=cfg.private, exist_ok=True)
            commit = api.upload_folder(repo_id=cfg.repo, folder_path=folder, commit_message=cfg.message)
        except OfflineModeIsEnabled:
            raise ValueError("HF_HUB_OFFLINE is set; unset it to push") from None
        except LocalTokenNotFoundError:
            raise ValueError("no Hub token on this machine; run `hf auth login` and push again") from None
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else "no"
            hint = "; run `hf auth login` and check that the token may write" if status in (401, 403) else ""
            raise ValueError(f"the Hub refused {cfg.repo} (status {status}){hint}") from None
        except (HTTPError, OSError) as error:
            raise ValueError(f"the Hub is not reachable ({type(error).__name__}); try again later") from None
    for path in sent:
        print(f"  {path}")
    print(f"pushed to {commit.commit_url}")
