"""What `pip install` makes of this folder: one package, which finds its own modules wherever Python runs."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from config import VERSION

ROOT = Path(__file__).parent.parent
ROOMS = [path.parent.name for path in ROOT.glob("*/__init__.py")]
OURS = {path.stem for folder in (".", "bench", "demo") for path in (ROOT / folder).glob("*.py")} | set(ROOMS)
COMMAND = "import sys; sys.argv[0] = 'manta'; from manta.server import main; main()"  # as pip's script does it
QUESTION = [{"role": "user", "content": "What is 23 + 58?"}]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with what a wheel holds that was built from the source distribution."""
    folder = tmp_path_factory.mktemp("package")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A user's folder, with files that are called like some of ours, and a clone's folder without the clone."""
    (tmp_path / "manta").mkdir()
    for name in ("config.py", "kernels.py", "models.py", "manta/config.py"):
        (tmp_path / name).write_text("raise SystemExit('this is the user\\'s own file')")
    return tmp_path


def run(installed: Path, elsewhere: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in the user's folder, which Python looks into before it looks into the package's."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.full
def test_the_wheel_holds_everything_under_one_name(installed: Path) -> None:
    (facts,) = installed.glob("*.dist-info")
    assert {path.name for path in installed.iterdir()} == {"manta", facts.name}
    wanted = {path.name for path in ROOT.glob("*.py")} - {"setup.py"} | {"__init__.py", "py.typed"}
    for folder in ("bench", "demo", "web", *ROOMS):
        wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc"}
    assert {str(path.relative_to(installed / "manta")) for path in installed.glob("manta/**/*.*")} == wanted


def imports(source: str) -> set[str]:
    """The modules that a file imports, each by the first part of its name."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What setup.py defines, without setuptools; `asked` is what it asks of these."""
    stand_in, command, options = ModuleType("setuptools"), ModuleType("build_py"), dict[str, Any]()
    stand_in.setup, command.build_py = lambda **more: options.update(more), object
    monkeypatch.setitem(sys.modules, "setuptools", stand_in)
    monkeypatch.setitem(sys.modules, "setuptools.command.build_py", command)
    spec = importlib.util.spec_from_file_location("recipe", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(**vars(module), asked=options)


def test_the_recipe_packs_all_folders(recipe: Any) -> None:
    folders = recipe.asked["package_dir"]
    assert set(recipe.asked["packages"]) == set(folders)
    assert set(folders.values()) == {".", "bench", "demo", *ROOMS}


@pytest.mark.parametrize(
    "folders", [["bench"], pytest.param([".", "demo", *ROOMS], marks=pytest.mark.full)], ids=["bench", "others"]
)
def test_the_recipe_finds_every_import_of_ours(recipe: Any, folders: list[str]) -> None:
    for path in (path for folder in folders for path in (ROOT / folder).glob("*.py")):
        assert not imports(recipe.packaged(path.read_text())) & OURS, path


@pytest.mark.full
def test_its_modules_import_each_other_from_the_package(installed: Path) -> None:
    for path in installed.glob("manta/**/*.py"):
        assert not imports(path.read_text()) & OURS, path


@pytest.mark.full
def test_it_depends_on_what_the_requirements_say(installed: Path) -> None:
    facts = PathDistribution(next(installed.glob("*.dist-info")))
    lines = [line.partition("#")[0] for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert facts.requires and len(facts.requires) == len([line for line in lines if line.strip()])


@pytest.mark.full
def test_a_script_finds_the_library(installed: Path, elsewhere: Path) -> None:
    code = f"from manta import LLM; print(LLM('demo').chat({QUESTION}, use_tqdm=False)[0].outputs[0].text)"
    done = run(installed, elsewhere, code)
    assert done.stdout == "81\n", done.stderr


@pytest.mark.full
def test_the_package_names_its_classes(installed: Path, elsewhere: Path) -> None:
    code = "import manta, sys; light = 'manta.engine' not in sys.modules; from manta import AsyncLLM, SamplingParams"
    code += "; from manta import LoRARequest; name = LoRARequest('sql', 1, '/sql').lora_name"
    code += f"; same = manta.__version__ == {VERSION!r} and {{'LLM', 'AsyncLLM', '__version__'}} <= {{*dir(manta)}}"
    shown = "print(light, AsyncLLM.__name__, SamplingParams(n=2).n, name, same)"
    done = run(installed, elsewhere, f"{code}\n{shown}\nmanta.LMM")
    assert done.stdout == "True AsyncLLM 2 sql True\n" and "module 'manta' has no attribute 'LMM'" in done.stderr


@pytest.mark.long
def test_type_checkers_see_the_package(installed: Path, elsewhere: Path) -> None:
    (elsewhere / "typed.py").write_text("from manta import LLM\n\nLLM('demo', max_num_seqs='3')\n")
    code = "from mypy.main import main; main(clean_exit=True)"
    done = run(installed, elsewhere, code, "typed.py", "--no-incremental")
    assert 'Argument "max_num_seqs" to "LLM" has incompatible type "str"; expected "int"' in done.stdout, done


@pytest.mark.full
def test_the_command_starts_its_processes(installed: Path, elsewhere: Path) -> None:
    """A batch runs an engine and a worker in processes of their own."""
    (command,) = PathDistribution(next(installed.glob("*.dist-info"))).entry_points
    assert (command.name, command.value) == ("manta", "manta.server:main")
    body = {"messages": QUESTION, "temperature": 0}
    line = {"custom_id": "sum", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (elsewhere / "in.jsonl").write_text(json.dumps(line))
    words = ("batch", "-i", "in.jsonl", "-o", "out.jsonl", "--device", "cpu")
    done = run(installed, elsewhere, COMMAND, *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads((elsewhere / "out.jsonl").read_text())
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "81"


@pytest.mark.full
def test_the_command_calls_itself_by_its_name(installed: Path, elsewhere: Path) -> None:
    done = run(installed, elsewhere, COMMAND, "--model", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("manta: error: there is no folder nowhere") and done.stderr.count("\n") == 1
