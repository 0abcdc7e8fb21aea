"""Files and batches of clients, in the folder `files_dir`, which all API processes share."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from api.checks import ApiError
from api.options import ServerConfig
from processes.child import Board, ClientShares

FILE, BATCH = "file-", "batch_"  # what ids begin with
ENDED = ("completed", "failed", "expired", "cancelled")  # states of a batch
KEPT = 30 * 24 * 3600  # seconds that a file stays after it was last written
CUT_SHORT = 24 * 3600  # and one whose upload has not ended, because the server was killed
MOST_FILES = 10_000  # in the room of a client: each counts at least this part of it
MOST_RUNNING = 4  # batches of an API process that run at a time


class Files:
    """Keeps the files of each client in a folder of its own: the bytes under the file's id, the object as `ID.json`.

    A batch has an object, too. While it runs, its answers so far are under its id, and `ID.cancel` asks for its end.
    Ids are made here, in the order of time; no other name becomes a part of a path. What has not been written for KEPT
    seconds goes.
    """

    def __init__(self, config: ServerConfig, board: Board, num_seqs: int):
        self.closed = "" if config.files_dir else "this server keeps no files; --files-dir names a folder for them"
        self.root = Path(config.files_dir or "").resolve()
        self.width = max(1, num_seqs // 2)  # the engines' other sequences are for requests that somebody waits for
        self.running = ClientShares(min(MOST_RUNNING, self.width), board, [0] * board.PLACES)  # batches of this process
        self.limit, self.sharing = config.max_files_bytes // max(1, config.shares), "" if config.shares else "*"
        if not self.closed:
            if not (secret := self.root / "secret").exists():
                with tempfile.NamedTemporaryFile(dir=self.root) as draft, contextlib.suppress(FileExistsError):
                    draft.write(board.secret)
                    draft.flush()
                    os.link(draft.name, secret)
            board.secret = secret.read_bytes()  # the first that was here, so clients keep their folders

    def path(self, owner: str, name: str) -> Path:
        """The path of a client's file; an `ApiError` if this server keeps none."""
        if self.closed:
            raise ApiError(404, self.closed)
        return self.root / owner / name

    def find(self, owner: str, id: str, kind: str) -> dict[str, Any]:
        """The object of this id; an `ApiError` if the client has none of this kind."""
        try:
            path = self.path(owner, f"{id}.json")
            if not re.fullmatch(f"{kind}[0-9a-f]{{32}}", id):
                raise FileNotFoundError
            record: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:
            raise ApiError(404, f"you have no {kind[:-1]} {id[:100]!r} here", "id") from None
        if kind == BATCH and record["status"] not in ENDED:
            with contextlib.suppress(FileNotFoundError):
                cancelled_at = path.with_suffix(".cancel").stat().st_mtime
                record |= {"status": "cancelling", "cancelling_at": int(cancelled_at)}
        return record

    def all(self, owner: str, kind: str) -> list[dict[str, Any]]:
        """All objects of a kind that a client has, the oldest first."""
        records = []
        for path in sorted(self.path(owner, "").glob(f"{kind}*.json")):
            time.sleep(0)
            with contextlib.suppress(ApiError):  # it has gone just now
                records.append(self.find(owner, path.stem, kind))
        return records

    def save(self, owner: str, record: dict[str, Any]) -> None:
        """Keep an object, in the place of an earlier one of its id; an OSError leaves that as it was."""
        path = self.path(owner, record["id"] + ".json")
        draft = path.with_suffix(".part")
        try:
            draft.write_bytes(msgspec.json.encode(record))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, owner: str, purpose: str, filename: str = "") -> Iterator[tuple[BinaryIO, dict[str, Any]]]:
        """A new file to write to, and its object. It is there for others once the `with` block has ended well."""
        record = new_object(FILE, bytes=0, filename=filename, purpose=purpose, status="processed", status_details=None)
        record["expires_at"] = record["created_at"] + KEPT
        path = self.path(owner, record["id"])
        part = path.with_suffix(".part")
        path.parent.mkdir(0o700, exist_ok=True)
        try:
            with open(part, "xb") as file:
                yield file, record
                record["bytes"] = file.tell()
                file.truncate()
            part.rename(path)
            self.save(owner, record)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            part.unlink(missing_ok=True)

    def delete(self, owner: str, id: str) -> dict[str, Any]:
        """Delete a file; an `ApiError` if the client has none of that id."""
        self.find(owner, id, FILE)
        for name in (f"{id}.json", id):
            self.path(owner, name).unlink(missing_ok=True)
        return {"id": id, "object": "file", "deleted": True}

    def need_room(self, owner: str, size: int) -> None:
        """Refuse `size` bytes more, if the client's share of the room is too small; older files than KEPT go first."""
        self.path(owner, "")
        room, now = self.limit, time.time()
        for path in self.root.glob(f"{self.sharing or owner}/*"):
            time.sleep(0)
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                if now > state.st_mtime + (CUT_SHORT if path.suffix == ".part" else KEPT):
                    path.unlink()
                else:
                    room -= max(state.st_size, self.limit // MOST_FILES)
        if size > room:
            message = f"{size} bytes would come, and there is room for {max(0, room)} (max_files_bytes)"
            raise ApiError(413, f"{message}; delete files, or wait: each goes 30 days after it was written")


def new_object(kind: str, **fields: Any) -> dict[str, Any]:
    """An object with an id of its own, which comes after all earlier ones in the order of names."""
    id = f"{kind}{time.time_ns():016x}{os.urandom(8).hex()}"
    return {"id": id, "object": kind[:-1], "created_at": int(time.time())} | fields
