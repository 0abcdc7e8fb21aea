"""A file of requests in, a file of answers out: `python server.py batch -i IN.jsonl -o OUT.jsonl MODEL`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
from typing import BinaryIO

import gevent
from gevent import monkey
from tqdm import tqdm

from api.options import ServerConfig
from api.routes import Api
from commands.batch_file import Answers, BatchRun, read_lines
from commands.flags import OptionParser, exit_on_mistake, option_groups, refuse_given
from commands.models import OneModel
from commands.start import read_configs, with_policy
from config import EngineConfig
from observe.logs import console

LINES_PER_SEQUENCE = 2  # lines in flight for each sequence that runs, so that the next ones wait in the engine
# Options of the server that mean nothing where there is no HTTP.
HTTP_ONLY = (
    *(name for name in option_groups(ServerConfig)["server"] if name != "served_model_name"),
    *option_groups(ServerConfig)["several models"],
    "max_queue", "max_pixel_bytes_in_flight", "body_timeout", "write_timeout",
)  # fmt: skip
SERVER_ONLY = ("headless", "data_parallel_start_rank")


def new_parser() -> OptionParser:
    parser = OptionParser(
        EngineConfig, ServerConfig, command="batch", usage="-i IN.jsonl -o OUT.jsonl [MODEL] [option ...]",
        description="Answer a file of requests, in the format of OpenAI's batches. A batch that has been cut short\n"
        "goes on when it is started again. Options that concern HTTP mean nothing here.",
    )  # fmt: skip
    parser.add_argument("-i", "--input-file", required=True, metavar="IN.jsonl", help="a request on each line")
    parser.add_argument("-o", "--output-file", required=True, metavar="OUT.jsonl", help="gets an answer on each line")
    return parser


def read_flags(flags: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The options; a ValueError names one that is out of range, or means nothing here."""
    refuse_given(flags, HTTP_ONLY, "a batch has no HTTP that it could concern")
    refuse_given(flags, SERVER_ONLY, "it is for servers")
    engine_config, config = read_configs(flags)
    engine_config = dataclasses.replace(engine_config, disable_log_stats=True)  # the progress bar tells as much
    # Lines wait for their turn here, so that none is ever refused because of others.
    config = dataclasses.replace(config, max_queue=sys.maxsize, max_pixel_bytes_in_flight=sys.maxsize)
    return with_policy(engine_config, config), config


def open_files(source: str, target: str) -> tuple[BinaryIO, Answers]:
    """The input and the output; a ValueError if the first cannot be read, or is the second. See also `Answers`."""
    with contextlib.ExitStack() as unless_kept:
        if os.path.exists(source) and not os.path.isfile(source):  # reads of a pipe would hold up all lines
            raise ValueError(f"{source} is no file; the input must be one")
        try:
            file = unless_kept.enter_context(open(source, "rb"))
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror}") from None
        if os.path.exists(target) and os.path.samefile(source, target):
            raise ValueError(f"the input is {source} and the output {target}; they must be two files")
        answers = Answers(target)
        unless_kept.pop_all()
        return file, answers


def main(argv: list[str]) -> None:
    """Answer a file of requests. Exit code 0 means that each line has an answer, though it may be a refusal.

    It is 2, after one line that says why, where the batch cannot start, 1 where it cannot go on, and 128 plus the
    signal's number after Ctrl-C or SIGTERM.
    """
    parser = new_parser()
    flags = parser.read(argv)
    with exit_on_mistake(parser):
        engine_config, config = read_flags(flags)
        model = OneModel(engine_config, config)
        file, answers = open_files(flags.input_file, flags.output_file)
    with model.running(parser, "batch") as fleet:
        # Each line is a greenlet, as each request is in an API process. Those are gunicorn's workers, which it patches.
        monkey.patch_all(os=False, signal=False, ssl=False, subprocess=False)
        client = fleet.new_client()
        api = Api(client, model.tokenizer, fleet.facts, config, model.names, model.board, model.adapters)
        width = LINES_PER_SEQUENCE * model.engine_config.max_num_seqs * model.engine_config.data_parallel_size
        pause = 0.2 if sys.stderr.isatty() else 30.0  # seconds between two states of the bar; a log needs few of them
        total = sum(1 for _ in read_lines(file, config.max_body_bytes))
        file.seek(0)
        bar = tqdm(total=total, desc="Batch", unit="line", mininterval=pause)
        batch = BatchRun(api, answers, width, bar)
        for number in (signal.SIGINT, signal.SIGTERM):
            gevent.signal_handler(number, batch.ended.set_exception, SystemExit(128 + number))
        try:
            with bar:
                batch.run(file, fleet.check)
        except OSError as error:
            console.error(f"{parser.prog}: error: {error}; {batch.summary()}")
            sys.exit(1)
        except SystemExit:
            console.info(f"batch: stopped; {batch.summary()}; the same command goes on from here")
            raise
        finally:
            client.shutdown()
        console.info(f"batch: {batch.summary()}")
