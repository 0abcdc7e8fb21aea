"""The server's options, and what they are enough for: `--help`, `--version` and `--plan`.

What is imported here needs no package. So these answer where the server's packages are missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from api.options import ServerConfig, with_all_keys
from checkpoints.hub import find_model
from commands.flags import OptionParser, exit_on_mistake, from_flags, refuse_given, split_command
from config import PACKAGES as OF_ENGINES
from config import PROG, EngineConfig, lacking
from model_config import ModelConfig
from observe.logs import set_up

ABOUT = f"""Run a model.

  {PROG}                       serve the bundled demo at http://127.0.0.1:8000
  {PROG} Qwen/Qwen3-0.6B       serve a model, downloaded from the hub
  {PROG} chat Qwen/Qwen3-0.6B  talk with it in the terminal"""
COMMANDS = {
    "serve": "answer HTTP requests as OpenAI's API does; this is what runs without a command",
    "chat": "talk with a model in the terminal",
    "complete": "go on from a text",
    "batch": "answer a file of requests",
}
# Packages that the server needs.
PACKAGES = (*OF_ENGINES, "huggingface_hub", "flask", "gunicorn", "gevent", "msgspec", "llguidance", "prometheus_client")


def size_or_model(text: str) -> float | str:
    """Read what follows `--plan`: a number of GiB, or else the model, which may stand there too."""
    try:
        return float(text)
    except ValueError:
        if text[:1].isdigit() and "/" not in text and not os.path.exists(text):
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number of GiB nor a model") from None
        return text


def server_flags(argv: list[str]) -> tuple[OptionParser, argparse.Namespace]:
    """The command line of the server, and what it says. With `--plan`, the plan is printed and the process ends."""
    usage = "[COMMAND] [MODEL] [option ...]"
    parser = OptionParser(EngineConfig, ServerConfig, usage=usage, description=ABOUT, commands=COMMANDS)
    parser.add_argument(
        "--plan", nargs="?", type=size_or_model, metavar="GIB", default=argparse.SUPPRESS,
        help="only print what takes how much memory, on this machine or on a GPU of so many GiB; no GPU is touched",
    )  # fmt: skip
    flags = parser.read(argv)
    if "plan" in flags:
        show_plan(parser, flags)
        sys.exit()
    return parser, flags


def show_plan(parser: OptionParser, flags: argparse.Namespace) -> None:
    """Print the plan that the flags ask for. Where there is none, end with a line that says why."""
    with exit_on_mistake(parser):
        if isinstance(size := flags.plan, str):
            if getattr(flags, "model", size) != size:
                raise ValueError(f"--plan is followed by {size!r}, and the model is {flags.model!r}; give one of them")
            flags.model, size = size, None
        refuse_given(flags, ("models", "models_dir"), "--plan is for one MODEL; /v1/models tells what several need")
        options = from_flags(EngineConfig, flags)
        with_all_keys(from_flags(ServerConfig, flags), os.environ)
        set_up(options.log_level, options.log_format)
        options = find_model(options, weights=False)
        if lack := lacking(("torch", "safetensors", "numpy", "psutil")):
            raise ValueError(lack)
        from device.startup import print_plan

        print_plan(options, ModelConfig.from_folder(options.folder, options.hf_overrides), size)


def answer_without(argv: list[str], lack: str) -> NoReturn:
    """Do what can be done where packages are missing, and end the process; else with a line that says what to do."""
    command, rest = split_command(argv, COMMANDS)
    parser = server_flags(rest)[0] if command in ("", "serve") else OptionParser(command=command)
    parser.error(lack)
