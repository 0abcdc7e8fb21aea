"""The command line: flags, files of options, what a mistake is told, and completion in a shell."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from api.options import ServerConfig
from commands.flags import OptionParser, flag_fields, from_flags, option_groups, refuse_given, split_command
from commands.plan import COMMANDS, PACKAGES, size_or_model
from commands.terminal import ChatOptions
from config import EngineConfig
from server import RUNS, main

ROOT = Path(__file__).parent.parent.parent
ENGINE_FLAGS, SERVER_FLAGS = flag_fields(EngineConfig), flag_fields(ServerConfig)


def read(*argv: str) -> tuple[EngineConfig, ServerConfig]:
    flags = OptionParser(EngineConfig, ServerConfig).read(argv)
    return from_flags(EngineConfig, flags), from_flags(ServerConfig, flags)


def test_nothing_given_is_all_defaults():
    assert read() == (EngineConfig(), ServerConfig())


def test_a_model_may_be_given_with_its_flag_or_without():
    for argv in (["a"], ["--model", "a"], ["a", "--model=a"], ["--port", "1", "a", "--seed", "2"], ["--compile", "a"]):
        assert read(*argv)[0].model == "a"


def test_flags_may_be_spelled_with_underscores():
    engine, server = read("--max_model_len=77", "--no-enable_prefix_caching", "--api_key", "a_b", "--api-key=--c_d")
    assert (engine.max_model_len, engine.enable_prefix_caching) == (77, False)
    assert server.api_key == ("a_b", "--c_d")


@pytest.mark.parametrize("line", ["F a=x b=y", "F a=x --port 1 F b=y", "F a=x F b=y", "F=a=x F=b=y"])
@pytest.mark.parametrize("name", [f.name for f in (*ENGINE_FLAGS, *SERVER_FLAGS) if f.default == ()])
def test_a_flag_of_several_values_takes_one_or_several_each_time(name, line):
    flags = OptionParser(EngineConfig, ServerConfig).read(["demo", *line.replace("F", f"--{name}").split()])
    assert flags.model == "demo" and getattr(flags, name) == ["a=x", "b=y"]


def test_a_flag_of_several_values_may_stand_before_the_model_if_it_is_told_apart():
    for argv in (["--api-key=a", "m"], ["--api-key", "a", "--", "m"], ["--api-key", "a", "b", "--port", "1", "m"]):
        engine, server = read(*argv)
        assert engine.model == "m" and server.api_key[0] == "a"
    assert read("--lora-modules", "a=x", "b=y")[1].lora_modules == ("a=x", "b=y")  # of the demo
    assert read("--api-key", "a", "m", "--model", "n")[1].api_key == ("a", "m")


@pytest.mark.parametrize(("text", "value"), [("1k", 1000), ("32K", 2**15), ("25.6k", 25600), ("0.5M", 2**19), ("7", 7)])
def test_whole_numbers_may_be_short(text, value):
    assert read("--max-model-len", text)[0].max_model_len == value


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("float", "float32")])
def test_dtypes_have_other_names(name, dtype):
    assert read("--dtype", name)[0].dtype == EngineConfig(dtype=name).dtype == dtype


def test_torchrun_is_another_name_of_the_external_launcher(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text('distributed-executor-backend = "torchrun"')
    for argv in (["--distributed-executor-backend", "torchrun"], ["--config", str(file)]):
        config = read(*argv)[0]
        assert config == EngineConfig(distributed_executor_backend="external_launcher")
        assert config.distributed_executor_backend == "external_launcher"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-model-len", "1.0005k"], "argument --max-model-len: '1.0005k' is no whole number; allowed are those"),
        (["--seed", "9" * 9999], "argument --seed: "),
        (["--port", "many"], "'many' is no whole number"),
        (["--port", "-1"], "port is -1; it must be at least 0 and at most 65535"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8' (choose from "),
        (["--distributed-executor-backend", "ray"], "invalid choice: 'ray' (choose from "),
        (["--max-nums", "3"], "there is no option --max-nums; the nearest is --max-num-seqs"),
        (["--max-num_seq=3", "demo"], "there is no option --max-num-seq; the nearest is --max-num-seqs"),
        (["--qqq", "3"], "there is no option --qqq"),
        (["-m", "demo"], "there is no option -m"),
        (["demo", "other"], "'other' is one argument too many"),
        (["demo", "--model", "other"], "MODEL is 'demo' and --model is 'other'; give one of them"),
        (["comlete"], "comlete is neither a folder nor a command, which comes first; the nearest is complete"),
        (["quantize", "demo"], "'demo' is one argument too many"),
        (["--port", "0", "chat"], "chat is neither a folder nor a command, which comes first; the nearest is chat"),
        (
            ["--top-p=0.5"],
            "--top-p is no option here: a request has 'top_p' in its body, and chat and complete take it",
        ),
        (["--plan", "80GB"], "argument --plan: '80GB' is neither a number of GiB nor a model"),
        (["--plan", "nowhere/at/all"], "there is no folder nowhere/at/all"),
        (["demo", "--plan", "other"], "--plan is followed by 'other', and the model is 'demo'; give one of them"),
        (["nowhere/at/all"], "there is no folder nowhere/at/all"),
        (["--api-key", "a", "m"], "takes all words behind it, and there is no MODEL; put MODEL before --api-key"),
        (["--lora-modules", "a=x", "m"], "--lora-modules takes all words behind it, and there is no MODEL"),
        (["demo", "--enable-lora", "--lora-modules", "a=x", "m"], "lora_modules has 'm'; it must be NAME=PATH, or an"),
        (["--config", "/nowhere.toml"], "/nowhere.toml cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, words):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out and said.err.count("\n") == 1
    assert said.err.startswith("server.py: error: ") and words in said.err


def test_a_command_is_named(capsys):
    for command in ("batch", "chat"):
        with pytest.raises(SystemExit):
            main([command, "--foo"])
        assert capsys.readouterr().err.startswith(f"server.py {command}: error: ")


def test_help_has_groups_and_tells_each_default_once(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.startswith("usage: server.py [COMMAND] [MODEL] [option ...]\n")
    assert all(re.search(rf"^  {command} +\w", text, re.MULTILINE) for command in COMMANDS)
    for title in (*EngineConfig.GROUPS, *ServerConfig.GROUPS):
        assert text.count(f"\n{title}:\n") == 1
    entries = re.split(r"\n(?=  --)", text)
    assert all(entry.count("default") <= 1 for entry in entries)
    about = {entry.split()[0].rstrip(","): " ".join(entry.split()) for entry in entries}
    assert about["--max-num-seqs"].endswith("(default: 256)")
    assert about["--enable-prefix-caching"].endswith("(default: on)")


def test_every_option_is_in_one_group():
    for cls in (EngineConfig, ServerConfig, ChatOptions):
        assert all(option_groups(cls).values()), cls  # so the first option of each title is there


@pytest.mark.parametrize("command", ["", "serve", "chat", "complete", "batch"])
def test_each_command_says_its_version(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--version"])
    assert ended.value.code == 0 and re.fullmatch(r"Manta \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_plan_is_of_a_gpu_or_of_a_model():
    assert [size_or_model(text) for text in ("80", "0.5", "demo", "01-ai/Yi-6B")] == [80.0, 0.5, "demo", "01-ai/Yi-6B"]
    assert math.isnan(size_or_model("nan")) and RUNS.keys() == COMMANDS.keys()


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--version"], 0, "Manta "),
        (["serve", "--help"], 0, "usage: server.py [COMMAND] [MODEL]"),
        ([], 2, "has no torch, safetensors, tokenizers and "),
        (["chat"], 2, "has no torch, safetensors, tokenizers and "),
        (["--plan", "demo"], 2, "has no torch, safetensors, numpy and 1 more: activate the environment"),
        (["--plan", "nowhere/at/all"], 2, "there is no folder nowhere/at/all"),
        (["--prot", "1"], 2, "there is no option --prot; the nearest is --port"),
    ],
)
def test_without_packages_it_says_what_to_do(argv, code, words):
    command = [sys.executable, "-S", str(ROOT / "server.py"), *argv]  # -S leaves out the environment's packages
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code and words in (done.stderr if code else done.stdout)
    assert code == 0 or done.stderr.count("\n") == 1


def test_without_packages_the_library_says_what_to_do():
    done = subprocess.run([sys.executable, "-S", "-c", "import engine"], cwd=ROOT, capture_output=True, text=True)
    assert "ModuleNotFoundError: " in done.stderr and "has no torch, safetensors, tokenizers and 4 more" in done.stderr


def test_the_packages_are_those_of_the_requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    optional = {"pillow", "triton", "setproctitle"}
    assert {re.match("[a-z_0-9]+", line)[0] for line in lines} == {*PACKAGES} | optional


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_sets_options_and_the_command_line_wins(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text(
        'model = "a"\nmax-num-seqs = 5\nmax_model_len = 64\nswap-space = 1\nenable-prefix-caching = false\n'
        'api-key = "one"\nserved_model_name = ["x", "y"]\nport = 1\n'
    )
    engine, server = read("--config", str(file), "--port", "2", "--max-model-len", "32")
    assert (engine.model, engine.max_num_seqs, engine.max_model_len) == ("a", 5, 32)
    assert (engine.swap_space, engine.enable_prefix_caching) == (1, False)
    assert (server.api_key, server.served_model_name, server.port) == (("one",), ("x", "y"), 2)
    assert read("b", "--config", str(file))[0].model == "b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "there is no option 'prot'; the nearest is port"),
        ("[server]\nport = 1", "there is no option 'server'"),
        ("config = 'other'", "there is no option 'config'"),
        ("port = 'one'", "port is 'one'; it must be of type int"),
        ("port = 70000", "port is 70000; it must be at least 0 and at most 65535"),
        ("port = true", "port is True; it must be of type int"),
        ("dtype = 'int8'", "dtype is 'int8'; allowed: auto, "),
        ("allowed-origins = [1]", "allowed_origins is (1,); it must be a list of strings"),
        ("allowed-origins = ['x']", "allowed_origins has 'x'; it must be "),
        ("max-num-seqs = 1\nmax_num_seqs = 2", "max_num_seqs is there twice"),
        ("port = ", "no TOML: "),
        (b"port = '\xff'", "no TOML: "),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_it(tmp_path, capsys, text, words):
    file = tmp_path / "options.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(file)])
    message = capsys.readouterr().err
    assert ended.value.code == 2 and message.count("\n") == 1 and f"{file}" in message and words in message


def test_a_mistake_of_the_command_line_is_not_the_files(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text("port = 70000")
    with pytest.raises(ValueError, match=r"^port is 70001"):
        read("--config", str(file), "--port", "70001")


def test_an_option_that_means_nothing_is_named_where_it_is_given(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text("max-queue = 4096")  # the default, but given
    flags = OptionParser(ServerConfig).read(["--config", str(file)])
    with pytest.raises(ValueError, match=r"options\.toml: max_queue is given; why$"):
        refuse_given(flags, ["port", "max_queue"], "why")


# --- commands ---------------------------------------------------------------------------------------------------------


def test_a_command_comes_first():
    assert split_command(["chat", "a"], COMMANDS) == ("chat", ["a"])
    assert split_command(["a", "chat"], COMMANDS) == ("", ["a", "chat"])
    assert split_command([], COMMANDS) == ("", [])
