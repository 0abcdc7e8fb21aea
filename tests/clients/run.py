"""Runs clients as their users do, each in an environment of its own, against servers of this folder.

    python tests/clients/run.py [NAME ...] [--cache FOLDER]

For each client, an environment is made in the cache folder, and the pinned version is installed there from PyPI or npm.
A script that ends with 0 has passed. What it printed is in the cache folder, in `NAME/log`; of one that fails, the end
is shown. No model and no data set is downloaded: one server runs the demo, and the others run random checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE.parent / "vision")]

from seeing import TALK  # noqa: E402
from seeing_folder import seeing_folder  # noqa: E402
from served import serving  # noqa: E402

TIMEOUT = 300  # seconds of one script
CLIENTS = {  # what is installed, and the script
    "openai-python": ("openai==3.54.0", "use_openai.py"),
    "anthropic": ("anthropic==2.12.0", "use_anthropic.py"),
    "lm-eval": ("lm-eval[hf,api]==0.4.13 torch==2.13.0", "use_lm_eval.py"),
    "langchain": ("langchain-openai==1.7.2", "use_langchain.py"),
    "litellm": ("litellm[mcp]==1.106.0", "use_litellm.py"),
    "openai-agents": ("openai-agents==0.24.0", "use_agents.py"),
    "llm": ("llm==0.36", "use_llm.py"),
    "guidellm": ("guidellm==0.8.1", "use_guidellm.py"),
    "openai-node": ("openai@7.57.0", "use_openai.mjs"),
    "claude-code": ("@anthropic-ai/claude-code@2.1.332", "use_claude_code.py"),
    "codex": ("@openai/codex@0.171.0", "use_codex.py"),
    "ai-sdk": ("ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7", "use_ai_sdk.mjs"),
}  # fmt: skip
SHAPE = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
LONG = {"max_position_embeddings": 2**17}  # the agents' own prompts are long
CHECKPOINTS = {  # for oracle.py; the names of folders and of models
    "tiny": {"config": "Qwen3Config", "shape": SHAPE, "prompts": [[5, 6]], "new": 1},
    "embedder": {"config": "Qwen3Config", "shape": SHAPE, "prompts": [[5, 6]], "head": "AutoModel"},
    "long": {"config": "Qwen3Config", "shape": SHAPE | LONG, "prompts": [[5, 6]], "new": 1},
}
SCRIPTED = "--served-model-name", "scripted", "gpt-5.5", "--reasoning-parser", "qwen3"
FLAGS = {  # of the servers
    "demo": (),
    "tiny": ("--model", "{}/tiny", "--max-logprobs", "20"),
    "embedder": ("--model", "{}/embedder", "--task", "embed"),
    "scripted": (*SCRIPTED, "--model", "{}/long"),
    "seeing": (*SCRIPTED, "--model", "{}/seeing", "--tool-call-parser", "hermes"),
}
LAUNCHER = (str(HERE / "scripted_model.py"),)
LAUNCHERS = {"scripted": LAUNCHER, "seeing": LAUNCHER}  # of servers whose model only says what a script has


def install(name: str, cache: Path) -> list[str]:
    """Make the environment of a client, unless it is there, and return the command that runs its script."""
    packages, script = CLIENTS[name]
    folder = cache / name
    done, venv = folder / "installed", folder / "venv"
    ours = [package for package in packages.split() if "==" in package]
    if not done.exists() or done.read_text().strip() != packages:
        folder.mkdir(parents=True, exist_ok=True)
        theirs = [package for package in packages.split() if "==" not in package]
        steps = [["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *theirs]] if theirs else []
        if ours:
            pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", *ours]
            steps += [[sys.executable, "-m", "venv", "--clear", str(venv)], pip]
        with open(folder / "install.log", "w") as log:
            for step in steps:
                subprocess.run(step, check=True, stdout=log, stderr=log)
        done.write_text(packages + "\n")
    if script.endswith(".mjs"):  # Node looks for packages beside the script
        return ["node", shutil.copy(HERE / script, folder)]
    return [str(venv / "bin/python") if ours else sys.executable, "-I", str(HERE / script)]


def make_checkpoints(folder: Path) -> None:
    """Random checkpoints with the demo's tokenizer."""
    (folder / "cases.json").write_text(json.dumps(CHECKPOINTS))
    oracle = HERE.parent / "oracle.py"
    subprocess.run([sys.executable, "-I", oracle, folder / "cases.json", folder], check=True, cwd=folder)
    for name in CHECKPOINTS:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "demo" / file, folder / name)
    seeing = Path(shutil.copytree(seeing_folder(folder, "llava"), folder / "seeing"))
    config = json.loads((seeing / "config.json").read_text())
    config["text_config"] |= LONG
    (seeing / "config.json").write_text(json.dumps(config))
    (seeing / "chat_template.jinja").write_text(TALK + "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def run_one(name: str, cache: Path, variables: dict[str, str]) -> tuple[str, float]:
    """Run the script of a client, and return what became of it, and its seconds."""
    begun = time.monotonic()
    try:
        command = install(name, cache)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not installed: {error}", time.monotonic() - begun
    home, log, begun = cache / name / "home", cache / name / "log", time.monotonic()
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": str(home)}
    folders = (cache / name / "venv/bin", cache / name / "node_modules/.bin", os.environ["PATH"])
    bin_folder = {"PATH": ":".join(map(str, folders))}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "ANTHROPIC_"))}
    with open(log, "w") as file:
        try:
            code = subprocess.run(
                command, env=inherited | offline | bin_folder | variables, cwd=home, stdout=file, stderr=file,
                stdin=subprocess.DEVNULL, timeout=TIMEOUT,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = f"no end within {TIMEOUT} s"
    if code == 0:
        return "passed", time.monotonic() - begun
    print(f"--- {name}: the end of {log}", *log.read_text().splitlines()[-40:], sep="\n", flush=True)
    return f"failed ({code})", time.monotonic() - begun


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"clients (default: all): {', '.join(CLIENTS)}")
    parser.add_argument("--cache", type=Path, help="keeps the environments (default: manta-clients in the temp folder)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CLIENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    cache = (args.cache or Path(tempfile.gettempdir()) / "manta-clients").resolve()
    cache.mkdir(parents=True, exist_ok=True)
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_checkpoints(folder)
        variables = {"DEMO": str(ROOT / "demo"), "TINY": str(folder / "tiny"), "CLIENTS": str(HERE)}
        for model, flags in FLAGS.items():
            log = folder / f"{model}-log"
            log.mkdir()
            flags = [flag.format(folder) for flag in flags]
            launcher = LAUNCHERS.get(model, ())
            server = stack.enter_context(serving(log, "--served-model-name", model, *flags, launcher=launcher))
            variables[f"{model.upper()}_URL"] = f"http://127.0.0.1:{server.port}"
        for name in args.names or CLIENTS:
            outcome, seconds = run_one(name, cache, variables)
            rows.append((name, CLIENTS[name][0], outcome, f"{seconds:.0f} s"))
            print(*rows[-1], sep="  ", flush=True)
    print()
    for row in [("client", "packages", "outcome", "time"), *rows]:
        print(f"{row[0]:15}{row[1][:45]:47}{row[2]:28}{row[3]}")
    sys.exit(any(row[2] != "passed" for row in rows))


if __name__ == "__main__":
    main()
