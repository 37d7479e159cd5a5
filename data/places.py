"""Where captured states live: a folder, or a store that hosts share by its address alone.

A store is whatever fsspec reaches: `s3://bucket/path` (pip install 'draftsmith[stores]'), `gs://bucket/path`,
`hf://datasets/name/path`. Files are written on the local disk, summed, and uploaded whole; who reads one gets a local
copy in a bounded cache folder, whose size and checksum have been compared. What fails on the way is tried again, ever
more slowly, and then said in one line. Credentials are the store's own affair (environment, `~/.aws`, fsspec's
configuration): an address that holds any is refused, and no message repeats one.

    draftsmith capture --target smollm2 --out s3://bucket/states
    ./launch.sh train/distill_draft.py --config configs/eagle3_smollm2.yaml states.folder=s3://bucket/states

Tested by `pytest tests/test_places.py`.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

OPEN_FILES = 64
TRIES = 5
PAUSE = 1.0  # seconds before the second try; doubles each time
CACHE_GB = 50.0
KEPT = 2 / 3  # share of the cache for files; the rest is for those that were deleted while they are mapped
ABANDONED = 600.0  # seconds after which an unfinished file in the cache is taken for a dead process's
CHUNK = 1 << 24
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_T = TypeVar("_T")


def cache_folder() -> Path:
    """Where what can be made or fetched again is kept: $DRAFTSMITH_CACHE, or ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith").expanduser()


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """`write(temporary)`, flush to disk, rename: `path` is whole or absent, whenever the process dies. Several writers of
    one path do not disturb each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


class Folder:
    """A folder of this machine, or of a file system that several mount."""

    remote = False
    poll = 0.2  # seconds between two looks at what other processes have written

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser()
        self.name = self.path.name or str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file."""
        if not self.path.is_dir():
            return {}
        found = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # renamed or deleted meanwhile
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def read(self, file: str) -> bytes:
        """The content of a small file. Raises FileNotFoundError."""
        return (self.path / file).read_bytes()

    def write(self, file: str, write: Callable[[Path], Any]) -> None:
        """`write(path)` makes the file, which is whole or absent at every moment."""
        write_atomically(self.path / file, write)

    def fetch(self, file: str, size: int, crc32: int) -> Path:
        """The path to read; who opens it compares size and checksum."""
        return self.path / file

    def delete(self, files: Sequence[str]) -> None:
        """Delete those of the files that are there."""
        for file in files:
            (self.path / file).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what killed writers left behind; nobody may be writing."""
        for left in self.path.glob("shard-*.tmp"):
            left.unlink(missing_ok=True)

    def open_files(self, largest: int) -> int:
        """How many shards may be mapped at once."""
        return OPEN_FILES


class Store:
    """A folder of a store, and the local folder of what was fetched from it.

    Any number of processes of a machine may share the cache. Its `limit` bytes hold, counting what is mapped still after
    it was deleted, for one reader; each further one may hold a third of that more for a while.
    """

    remote = True
    poll = 2.0

    def __init__(self, url: str, cache: Path | str | None = None, limit: int = int(CACHE_GB * 1e9)) -> None:
        _check_address(url)
        self.url = url.rstrip("/")
        self.name = "/".join(self.url.split("/")[-2:])
        self.root = Path(cache).expanduser() if cache else cache_folder() / "states"
        self.limit = limit
        self.copies = self.root / sha256(self.url.encode()).hexdigest()[:16]
        self._fs, self._base = _file_system(self.url)
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}  # one download of a file at a time
        self._sound: set[Path] = set()  # copies whose checksum this process has seen
        self._wanted: list[tuple[str, int, int]] = []
        self._wake = threading.Condition(self._lock)
        self._fetcher: threading.Thread | None = None

    def __str__(self) -> str:
        return self.url

    def sizes(self) -> dict[str, int]:
        """Bytes of every file."""

        def look() -> dict[str, int]:
            self._fs.invalidate_cache()
            found = self._fs.ls(self._base, detail=True)
            return {f["name"].rsplit("/", 1)[-1]: int(f["size"] or 0) for f in found if f["type"] == "file"}

        try:
            return self._try("listed", look)
        except FileNotFoundError:
            return {}

    def read(self, file: str) -> bytes:
        """The content of a small file. Raises FileNotFoundError."""
        return self._try(f"read ({file})", lambda: self._fs.cat_file(f"{self._base}/{file}"))

    def write(self, file: str, write: Callable[[Path], Any]) -> None:
        """`write(path)` makes a local file, which is then uploaded; object stores show it when all of it is there."""
        local = _temporary(self.root / file)
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            write(local)
            self._try(f"written ({file})", lambda: self._fs.put_file(str(local), f"{self._base}/{file}"))
        except OSError as error:
            raise self._explained(error) from None
        finally:
            local.unlink(missing_ok=True)

    def fetch(self, file: str, size: int, crc32: int) -> Path:
        """The path of a local copy with this size and checksum.

        Raises:
            ValueError: the store has no such file, or another one.
            OSError: the store cannot be reached, or the cache is full.
        """
        path = self.copies / f"{crc32:08x}-{file}"
        with self._lock:
            busy = self._busy.setdefault(file, threading.Lock())
        with busy:
            try:
                if not self._has(path, size, crc32):
                    self._download(file, path, size, crc32)
                os.utime(path)  # the least recently used copy goes first
            except OSError as error:
                raise self._explained(error) from None
        return path

    def prefetch(self, files: Sequence[tuple[str, int, int]]) -> None:
        """Fetch these (name, size, checksum) in the background, in this order and as far as half of the cache takes
        them; replaces what was asked for before. What fails is left to `fetch`."""
        room, taken = self.limit * KEPT / 2, 0
        wanted = []
        for one in files:
            taken += one[1]
            if taken > room:
                break
            wanted.append(one)
        with self._wake:
            self._wanted = wanted
            if wanted and self._fetcher is None:
                self._fetcher = threading.Thread(target=self._fetch_wanted, name="states", daemon=True)
                self._fetcher.start()
            self._wake.notify()

    def delete(self, files: Sequence[str]) -> None:
        """Delete those of the files that are there, and their copies here."""
        for file in files:
            with suppress(FileNotFoundError):
                self._try(f"deleted from ({file})", partial(self._fs.rm_file, f"{self._base}/{file}"))
            for copy in self.copies.glob(f"*-{file}"):
                copy.unlink(missing_ok=True)

    def tidy(self) -> None:
        """An upload that was cut off left nothing behind."""

    def open_files(self, largest: int) -> int:
        """How many shards may be mapped at once: they keep their bytes on disk after they were deleted."""
        return max(1, min(OPEN_FILES, int(self.limit * (1 - KEPT)) // max(largest, 1)))

    def _fetch_wanted(self) -> None:
        while True:
            with self._wake:
                while not self._wanted:
                    self._wake.wait()
                one = self._wanted.pop(0)
            with suppress(OSError, ValueError):  # whoever needs it meets the same, and says so
                self.fetch(*one)

    def _has(self, path: Path, size: int, crc32: int) -> bool:
        """Whether there is a sound copy; one that is not is deleted. Looks at the content once per process."""
        try:
            if path.stat().st_size == size and (path in self._sound or checksum(path) == crc32):
                self._sound.add(path)
                return True
        except FileNotFoundError:
            return False
        path.unlink(missing_ok=True)
        self._sound.discard(path)
        return False

    def _download(self, file: str, path: Path, size: int, crc32: int) -> None:
        if size > self.limit * KEPT:
            raise ValueError(
                f"{self.name}/{file} has {size:,} bytes, the cache takes {int(self.limit * KEPT):,}: raise states.cache_gb"
            )
        self.copies.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)

        def load() -> None:
            self._make_room(size)
            self._fs.get_file(f"{self._base}/{file}", str(temporary))
            if temporary.stat().st_size != size or checksum(temporary) != crc32:
                raise _Torn

        try:
            self._try(f"read ({file})", load)
            os.replace(temporary, path)
        except FileNotFoundError:
            raise ValueError(f"{self.name}: {file} is missing; capture again, it will be written anew") from None
        except _Torn:
            raise ValueError(f"{self.name}/{file} has changed since it was written, or arrives damaged") from None
        finally:
            temporary.unlink(missing_ok=True)
        self._sound.add(path)

    def _make_room(self, size: int) -> None:
        """Delete the least recently used copies until `size` more bytes fit."""
        files = []
        for path in self.root.glob("*/*"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            if not path.name.endswith(".tmp") or time.time() - found.st_mtime > ABANDONED:
                files.append((found.st_mtime, found.st_size, path))
        used = sum(n for _, n, _ in files)
        for _, n, path in sorted(files):
            if used + size <= self.limit * KEPT:
                return
            path.unlink(missing_ok=True)
            self._sound.discard(path)
            used -= n

    def _try(self, what: str, call: Callable[[], _T]) -> _T:
        """`call()`, again with longer and longer pauses while it fails for a reason that may pass.

        Raises:
            FileNotFoundError, PermissionError, or an OSError of the local disk: at once.
            ConnectionError: it still fails, one line.
        """
        for turn in range(TRIES):
            if turn:
                time.sleep(PAUSE * 2 ** (turn - 1))
            try:
                return call()
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:  # every backend has errors of its own
                if (isinstance(error, OSError) and error.errno in FULL) or (isinstance(error, _Torn) and turn):
                    raise
                if turn == TRIES - 1:
                    raise ConnectionError(
                        f"{self.url} cannot be {what} after {TRIES} tries ({_plain(error)}); "
                        "what is there stays, the same command goes on from it"
                    ) from None
        raise AssertionError("unreachable")

    def _explained(self, error: OSError) -> OSError:
        """The same in one line that says what to do, without the backend's own text."""
        if error.errno in FULL:
            return OSError(
                f"no space for states in the cache folder {self.root} ({os.strerror(error.errno or 0)}): "
                "free some, lower states.cache_gb, or set states.cache to another disk"
            )
        if isinstance(error, PermissionError):
            return PermissionError(
                f"{self.url}: access refused ({_plain(error)}); credentials come from the environment or the store's own files"
            )
        if isinstance(error, FileNotFoundError):
            return OSError(f"{self.url}: no such bucket or folder ({_plain(error)})")
        return error


Place = Folder | Store


class _Torn(Exception):
    """A download that is not what was uploaded."""


def place_of(where: str | Path | Place, cache: str | None = None, cache_gb: float = CACHE_GB) -> Place:
    """A folder, or, for an address with `://`, a store; `cache`, `cache_gb`: where and how much of it is kept here."""
    if isinstance(where, Folder | Store):
        return where
    if "://" not in str(where):
        return Folder(where)
    return Store(str(where), cache, int(cache_gb * 1e9))


def inside(place: Place, name: str) -> Place:
    """The folder `name` of a place."""
    if isinstance(place, Folder):
        return Folder(place.path / name)
    return Store(f"{place.url}/{name}", place.root, place.limit)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")


def _check_address(url: str) -> None:
    """Raise ValueError for an address that is none, is chained, or holds a credential; never repeats it."""
    scheme, _, rest = url.partition("://")
    if "@" in rest.split("/")[0] or "?" in rest:
        raise ValueError(
            f"an address of states holds no credentials and no query: give {scheme}://BUCKET/PATH alone, and the "
            "credentials by the environment (AWS_ACCESS_KEY_ID, ...) or the store's own files"
        )
    if "::" in url or not rest.strip("/") or not scheme:
        raise ValueError(f"{url!r} is no address of states; give a folder, or s3://BUCKET/PATH, gs://..., hf://...")


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path inside it."""
    from fsspec.core import url_to_fs

    try:
        fs, base = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url}: {_plain(error)}; s3:// needs pip install 'draftsmith[stores]'") from None
    return fs, base.rstrip("/")


def _plain(error: BaseException) -> str:
    """What an error says, in one line, without queries and credentials of an address in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"//[^/\s@]+@", "//", re.sub(r"\?[^\s\"']*", "", text))[:300]
