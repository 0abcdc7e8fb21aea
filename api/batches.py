"""The routes of `/v1/files` and `/v1/batches`.

A batch runs in the background, in one API process: the lock on its answers sees to that. It goes through
`api/batch_file.py`, so it goes on where it was when its process has ended: `go_on` looks for such batches.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import gevent
from flask import g, request, send_file
from tqdm import tqdm
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.formparser import MultiPartParser

from api import checks
from api.batch_file import Answers, BatchRun, count_lines, run_to_end
from api.checks import ApiError, Face, Field, without_folders
from api.fields import Name
from api.files import BATCH, ENDED, FILE, new_object
from api.generation import as_api_error
from api.http import arriving, fields_of, reply
from api.openapi import Path
from api.response_store import PAGE_OF_ITEMS, page_of
from api.routes import Api
from observe.logs import logger
from processes.child import LOOK, ClientShares

MOST_HELD, MOST_PARTS, MOST_BOUNDARY = 2**16, 8, 70  # of a form: bytes in memory, parts, bytes of its boundary
BYTES = "application/octet-stream"
ANSWERS = f"{BATCH}{'?' * 32}"  # names of files, one for each batch that has not ended
MOST_BATCHES = 100  # of a client, that have not ended
WINDOW = 24 * 3600  # seconds that a batch may take
RETRY = 60  # seconds that a batch waits where the disk is full
STAMPS = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


class Ended(Exception):
    """A batch ends before all its lines are answered; the text is its status."""


def upload_file(api: Api) -> dict[str, Any]:
    """Store the file of a form as it arrives, and return its object."""
    most, boundary = api.config.max_file_bytes, request.mimetype_params.get("boundary", "")
    if request.mimetype != "multipart/form-data" or not 0 < len(boundary) <= MOST_BOUNDARY:
        must = f"it must be multipart/form-data with a boundary of at most {MOST_BOUNDARY} characters"
        raise ApiError(415, f"the content type is {request.content_type!r:.100}; {must}")
    size = request.content_length or most
    api.files.need_room(g.client, size)
    with (
        api.files.writing(g.client, "batch") as (file, record),
        contextlib.closing(arriving(api.config, most, "max_file_bytes")) as parts,  # it has a timer
    ):
        file.truncate(size)  # so that other uploads count it
        api.files.need_room(g.client, 0)  # beside those that have begun meanwhile
        new_target: Any = partial(SimpleNamespace, write=file.write, seek=lambda at: None)
        source: Any = SimpleNamespace(read=lambda size: next(parts, b""))
        try:
            parser = MultiPartParser(new_target, MOST_HELD, max_form_parts=MOST_PARTS)
            texts, files = parser.parse(source, boundary.encode(), None)
        except RequestEntityTooLarge:
            may = f"{MOST_PARTS} parts, and {MOST_HELD} bytes for the head of each and for a text"
            raise ApiError(413, f"the form is too large: it may have {may}") from None
        except ValueError as error:
            raise ApiError(400, f"the form cannot be read: {error}") from None
        if (names := sorted(str(name) for name, _ in (*texts.items(True), *files.items(True)))) != ["file", "purpose"]:
            raise ApiError(400, f"the form has {', '.join(names)!r:.200}; it must have a purpose and a file")
        if texts.get("purpose") != "batch":
            raise ApiError(400, f"purpose is {texts.get('purpose')!r:.80}; it must be batch", "purpose")
        if "file" not in files:
            raise ApiError(400, "the part called file has no filename; it must have one", "file")
        record["filename"] = (files["file"].filename or "")[:255]
    return record


def create_batch(api: Api) -> dict[str, Any]:
    """Make a batch of a file, and run it in the background."""
    fields = fields_of(api, NEW_BATCH)
    file = api.files.find(g.client, fields["input_file_id"], FILE)
    if file["purpose"] != "batch":
        raise ApiError(400, f"the purpose of this file is {file['purpose']}; it must be batch", "input_file_id")
    api.files.need_room(g.client, api.files.limit // 100)
    if (count := sum(1 for _ in api.files.path(g.client, "").glob(ANSWERS))) >= MOST_BATCHES:
        raise ApiError(429, f"{count} batches of yours have not ended; at most {MOST_BATCHES} may wait and run")
    batch = new_object(
        BATCH, status="validating", errors=None, **{field.name: fields[field.name] for field in NEW_BATCH.own},
        output_file_id=None, error_file_id=None, expires_at=int(time.time()) + WINDOW, **dict.fromkeys(STAMPS),
        request_counts={"total": 0, "completed": 0, "failed": 0},
    )  # fmt: skip
    (answers := api.files.path(g.client, batch["id"])).touch()
    try:
        api.files.save(g.client, batch)
    except OSError:
        answers.unlink()
        raise
    gevent.spawn(run, api, g.client, batch["id"])
    return batch


NEW_BATCH = Face(
    "batches", ("/v1/batches",),
    (
        Field("input_file_id", Name),
        Field("endpoint", Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]),
        Field("completion_window", Literal["24h"]),
        Field("metadata", dict[str, str], None, checks.metadata),
    ),
    create_batch, needed=("input_file_id", "endpoint", "completion_window"), not_yet={"output_expires_after": ()},
)  # fmt: skip


def cancel_batch(api: Api, id: str) -> dict[str, Any]:
    """Ask for the end of a batch."""
    if (status := api.files.find(g.client, id, BATCH)["status"]) in ENDED:
        raise ApiError(400, f"the batch is {status}; only one that has not ended can be cancelled", "id")
    api.files.path(g.client, f"{id}.cancel").touch()
    return api.files.find(g.client, id, BATCH)


def go_on(api: Api) -> None:
    """Run the batches whose process has ended before them, which have their answers so far."""
    for path in () if api.files.closed else api.files.root.glob(f"*/{ANSWERS}"):
        gevent.spawn(run, api, path.parent.name, path.name)


def run(api: Api, owner: str, id: str) -> None:
    """Run a batch to its end, unless another process does, or until the server drains."""
    files = api.files
    while files.running.held[owner] and not files.running.has_room(owner, 1):  # each client may run one
        if files.find(owner, id, BATCH)["status"] == "cancelling":
            break
        gevent.sleep(LOOK)
    files.running.take(owner, 1)
    try:
        with contextlib.closing(Answers(str(files.path(owner, id)))) as answers:
            if (batch := files.find(owner, id, BATCH))["status"] not in ENDED:
                finish(api, owner, batch, answers)
            for name in (id, f"{id}.cancel"):
                files.path(owner, name).unlink(missing_ok=True)
    except (ApiError, ValueError) as error:  # as a rule another process runs it
        logger.info(f"{id} is not run here: {without_folders(str(error))}")
    except OSError as error:
        logger.warning(f"{id} waits for {RETRY} s: {without_folders(str(error))}")
        gevent.spawn_later(RETRY, run, api, owner, id)
    finally:
        files.running.take(owner, -1)


def finish(api: Api, owner: str, batch: dict[str, Any], answers: Answers) -> None:
    """Answer the lines of a batch, and then put answers and errors into a file each."""
    status, files = "completed", api.files
    try:
        answer_lines(api, owner, batch, answers)
    except Ended as ended:
        status = str(ended)
    except OSError:  # no mistake of the client
        raise
    except Exception as error:
        status, mistake = "failed", as_api_error(error)
        why = {"code": mistake.code, "message": str(mistake)[:1000], "param": mistake.param, "line": None}
        batch["errors"] = {"object": "list", "data": [why]}
    batch["request_counts"] |= answers.counts
    enter(api, owner, batch, "finalizing")
    for name, kind in (("output_file_id", "completed"), ("error_file_id", "failed")):
        if answers.counts[kind]:
            filename = f"{batch['id']}_{kind}.jsonl"
            with files.writing(owner, "batch_output", filename) as (file, record), open(answers.path, "rb") as lines:
                for line in lines:
                    time.sleep(0)
                    if line.endswith(b'"error":null}\n') == (kind == "completed"):
                        file.write(line)
            batch[name] = record["id"]
    enter(api, owner, batch, status)
    logger.info(f"{batch['id']} is {status}: {batch['request_counts']}")


def enter(api: Api, owner: str, batch: dict[str, Any], status: str) -> None:
    """Give a batch another status."""
    batch |= {"status": status, f"{status}_at": int(time.time())}
    api.files.save(owner, batch)


def answer_lines(api: Api, owner: str, batch: dict[str, Any], answers: Answers) -> None:
    """Answer the lines of a batch that have no answer yet. It may be `Ended` meanwhile, or there is no more room."""
    files, api = api.files, copy.copy(api)
    api.answers = ClientShares(sys.maxsize, api.board, api.board.answers)  # lines wait here, so none is refused

    def look() -> None:
        if api.board.draining:
            raise gevent.GreenletExit  # it goes on when the server starts again
        latest = files.find(owner, batch["id"], BATCH)
        batch["cancelling_at"] = latest["cancelling_at"]
        if latest["status"] == "cancelling" or time.time() > batch["expires_at"]:
            raise Ended("cancelled" if latest["status"] == "cancelling" else "expired")
        files.need_room(owner, 0)
        batch["request_counts"] |= answers.counts
        files.save(owner, batch)

    look()
    files.find(owner, batch["input_file_id"], FILE)
    with open(files.path(owner, batch["input_file_id"]), "rb") as file:
        if batch["status"] == "validating":
            batch["request_counts"]["total"] = count_lines(file, api.config.max_body_bytes)
            if not batch["request_counts"]["total"]:
                raise ApiError(400, "the file has no lines", "input_file_id", "empty_file")
            enter(api, owner, batch, "in_progress")
        run_to_end(BatchRun(api, answers, files.width, tqdm(disable=True), owner, batch["endpoint"]), file, look)


BATCH_PATHS = (
    Path("POST", "/v1/files", "upload_file", "Store a file of requests, which a form brings with the purpose batch.",
         lambda api: reply(upload_file(api))),
    Path("GET", "/v1/files", "files", "Your files, by pages.",
         lambda api: reply(page_of(api.files.all(g.client, FILE), request.args, "purpose")),
         query=PAGE_OF_ITEMS | {"purpose": {"type": "string"}}),
    Path("GET", "/v1/files/<id>", "file", "One of them.",
         lambda api, id: reply(api.files.find(g.client, id, FILE))),
    Path("GET", "/v1/files/<id>/content", "file_content", "Its bytes.",
         lambda api, id: send_file(api.files.path(g.client, api.files.find(g.client, id, FILE)["id"]), BYTES), BYTES),
    Path("DELETE", "/v1/files/<id>", "delete_file", "Delete it.",
         lambda api, id: reply(api.files.delete(g.client, id))),
    Path("POST", "/v1/batches", "create_batch", "Answer a file of requests in the background.",
         lambda api: reply(create_batch(api)), body=NEW_BATCH),
    Path("GET", "/v1/batches", "batches", "Your batches, by pages.",
         lambda api: reply(page_of(api.files.all(g.client, BATCH), request.args)), query=PAGE_OF_ITEMS),
    Path("GET", "/v1/batches/<id>", "batch", "One of them.",
         lambda api, id: reply(api.files.find(g.client, id, BATCH))),
    Path("POST", "/v1/batches/<id>/cancel", "cancel_batch", "End it early.",
         lambda api, id: reply(cancel_batch(api, id))),
)  # fmt: skip
