"""The house rules that a reader relies on: who may import whom, what is free of torch, and that the ops have twins."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STORY = [  # the files that one reads, in the order of a request
    "server", "engine", "core", "scheduler", "admission", "sequence", "kv_cache", "plan", "executor", "ring", "worker",
    "batch_state", "model", "layers", "kernels",
]  # fmt: skip
SHARED = [
    "config", "sampling_params", "model_config", "tokenizer", "outputs", "parallel", "reference", "async_llm", "setup",
]  # fmt: skip
DOORS = {  # each folder, and the files and folders that may import it
    "api": {"server", "commands"},
    "commands": {"server"},
    "text": {"tokenizer", "outputs", "core", "engine", "async_llm", "processes", "api"},
    "models": {"core", "model", "layers", "lora", "model_config", "device", "speculation", "checkpoints", "cpu"},
    "checkpoints": {"core", "model_config", "models", "device", "lora", "speculation", "cpu"},
    "ops": {"kernels"},
    "cpu": {"device", "lora"},
    "scheduling": {"scheduler", "admission", "sequence", "core"},
    "device": {"core", "executor", "executors", "server", "commands", "worker"},  # commands for `--plan`
    "processes": {"engine", "async_llm", "server", "api", "commands", "config"},
    "executors": {"core", "processes"},
    "observe": {"core", "scheduler", "worker", "api"},
    "lora": {"core", "worker", "device"},
    "speculation": {"config", "device"},
    "vision": {
        "api",
        "async_llm",
        "commands",
        "device",
        "engine",
        "layers",
        "model",
        "model_config",
        "models",
        "processes",
        "text",
    },
}
ALL = {  # what any file may import: names in the log, models by name, how layers share the KV pool, what adapters are
    "observe.logs", "checkpoints.hub", "models.kv_layout", "lora.adapter",
}  # fmt: skip
# From the door down: the story in its order, and each folder below the files that it hangs on. Only the plan's records
# stand lower than in the story, because all that comes after them carries or reads them.
FLOORS = [
    "server", "commands", "api", "async_llm", "engine", "processes", "core", "text", "executors", "device", "scheduler",
    "admission", "scheduling", "sequence", "kv_cache", "executor", "ring", "worker", "speculation", "lora", "outputs",
    "cpu", "models", "checkpoints", "tokenizer", "observe", "batch_state", "vision", "plan", "model", "layers",
    "parallel", "model_config", "kernels", "ops", "sampling_params", "reference", "config", "setup",
]  # fmt: skip
WITH_CIRCLES = ("models.", "scheduling.", "device.exchanges", "device.phases", "parallel", "api.generation")
MOST_ARROWS_UP = 19  # pairs of a file or folder and a higher one from which it imports something
ROOMS = [path.parent.name for path in sorted(ROOT.glob("*/__init__.py"))]
FILES = {  # by the names that an import has
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in (".", *ROOMS)
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.stem != "__init__"
}
EVERY_FILE = [
    path
    for folder in (".", *ROOMS, "bench", "campaigns", "demo", "tests", *(f"tests/{room}" for room in ("bench", *ROOMS)))
    for path in sorted((ROOT / folder).glob("*.py"))
]
# These may fall. They rise only when a capability with a name of its own comes.
MOST_ROOT_FILES, MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_README_WORDS = 24, 700, 80, 750
MOST_STORY_LINES = 6587
MOST_LINES = {
    ".": 10668, "api": 5996, "checkpoints": 3264, "commands": 1316, "cpu": 2541, "device": 4225, "executors": 205,
    "lora": 1202, "models": 4556, "observe": 1356, "ops": 3118, "processes": 3676,
    "scheduling": 2322, "speculation": 779, "text": 4587, "vision": 675,
}  # fmt: skip
STDLIB_ONLY = {
    "admission", "checkpoints.gguf_config", "checkpoints.gguf_file", "checkpoints.gguf_folder",
    "checkpoints.gguf_names", "checkpoints.gguf_tokenizer", "checkpoints.ollama", "checkpoints.quantization", "config",
    "kv_cache", "lora.adapter", "model_config", "models.config_fields", "models.encoder_rows", "models.families",
    "models.family_row",
    "models.kv_layout",
    "models.pooling", "models.read_config", "models.read_rope", "models.read_tower", "models.text_halves",
    "models.tower_rows", "observe.freed_blocks",
    "observe.live", "observe.logs", "observe.metrics", "plan", "sampling_params", "scheduler",
    "scheduling.adapters", "scheduling.beam_search", "scheduling.classic", "scheduling.crash_isolation",
    "scheduling.disk", "scheduling.lanes", "scheduling.drafts", "scheduling.fair", "scheduling.host_memory",
    "scheduling.limits", "scheduling.policy", "scheduling.reports", "scheduling.reserve", "scheduling.samples",
    "scheduling.states", "scheduling.vision", "sequence", "speculation.options",
}  # fmt: skip
TORCH_FREE_ROOMS = ("api", "commands", "text", "scheduling", "processes", "executors")
TORCH_FREE = (
    {name for name in FILES if name.startswith(TORCH_FREE_ROOMS)}
    | STDLIB_ONLY
    | {"vision.fetch", "vision.pictures", "vision.processors"}
    | {"device.serve", "device.workers", "engine", "lora.registry", "server"}
)
OPS = {name for name in FILES if name.split(".")[0] in ("kernels", "reference", "ops", "cpu")}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.Module) -> set[str]:
    """The modules that a file imports, each by the first part of its name."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    return modules


def ours(tree: ast.AST, types: bool = False) -> set[str]:
    """Our own files that a file imports when it runs, by their whole names, or also (`types`) for annotations alone."""
    imported = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            continue
        imported |= ours(node, types)
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= names if node.module in ROOMS else {node.module}
    return {name for name in imported if name in FILES}


def test_the_root_is_the_story_and_what_all_share():
    root = [name for name in FILES if "." not in name]
    assert len(root) <= MOST_ROOT_FILES and set(root) >= set(STORY + SHARED)


def lines_of(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_the_story_can_be_read():
    assert lines_of(*(ROOT / f"{name}.py" for name in STORY)) <= MOST_STORY_LINES


@pytest.mark.parametrize("folder", [".", *ROOMS])
def test_a_folder_stays_small(folder):
    assert lines_of(*(ROOT / folder).glob("*.py")) <= MOST_LINES[folder]


@pytest.mark.parametrize("room", ROOMS)
def test_a_folder_says_what_it_is_for(room):
    tree = tree_of(ROOT / room / "__init__.py")
    assert room in DOORS and ast.get_docstring(tree) and len(tree.body) == 1


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_imports_what_it_may(name):
    """A folder is imported by its doors alone; what decides needs the standard library alone, or at least no torch."""
    tree = tree_of(FILES[name])
    imported, room = ours(tree), name.split(".")[0]
    past = {
        there for there in imported - ALL if room not in DOORS.get(there.split(".")[0], {room}) | {there.split(".")[0]}
    }
    assert not past
    assert "." not in name or not imported & {"server", "engine"}
    if name in STDLIB_ONLY:
        packages = imports(tree) - set(sys.stdlib_module_names)
        assert packages <= set(ROOMS) | {there for there in FILES if "." not in there}
    if name in TORCH_FREE:
        assert not imports(tree) & {"torch", "triton"}


def test_no_two_files_import_each_other():
    """Not even by way of others, when they are loaded."""
    at_once = {
        name: ours(ast.Module([node for node in tree_of(path).body if not hasattr(node, "body")], []))
        for name, path in FILES.items()
    }

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in seen:
            for there in at_once[name]:
                follow(there, (*path, name))
            seen.add(name)

    seen: set[str] = set()
    for name in FILES:
        follow(name, ())


def test_few_imports_run_up():
    """Between a file of the root or a folder and another one; what is imported for annotations alone counts, too."""
    assert sorted(FLOORS) == sorted({name.split(".")[0] for name in FILES})
    assert [name for name in FLOORS if name in STORY and name != "plan"] == [name for name in STORY if name != "plan"]
    floors = {name: floor for floor, name in enumerate(FLOORS)}
    arrows = {(name.split(".")[0], there.split(".")[0]) for name in FILES for there in ours(tree_of(FILES[name]), True)}
    up = sorted((low, high) for low, high in arrows if floors[low] > floors[high])
    assert len(up) <= MOST_ARROWS_UP, up


def test_no_two_files_need_each_other_for_their_annotations():
    """Not even by way of others. In `WITH_CIRCLES` parts of a whole, and phases of a step, are annotated with it."""
    arrows = {
        name: {there for there in ours(tree_of(path), True) if not there.startswith(WITH_CIRCLES)} - {name}
        for name, path in FILES.items()
        if not name.startswith(WITH_CIRCLES)
    }
    while free := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in free:
            del arrows[name]
    assert not arrows


def test_importing_the_engine_leaves_torch_alone():
    """2 s and 300 MB that an API process does not pay."""
    code = "import sys, async_llm, engine, server; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def public_functions(name: str) -> dict[str, list[str]]:
    """The parameters of each public function of a module, and of those that it imports from another file of ops."""
    signatures = {}
    for node in tree_of(FILES[name]).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.decorator_list:
            signatures[node.name] = [arg.arg for arg in node.args.args]
        elif isinstance(node, ast.ImportFrom) and node.module in OPS:
            specified = public_functions(node.module)
            signatures |= {alias.name: specified[alias.name] for alias in node.names if alias.name in specified}
    return signatures


def test_every_backend_has_the_specifications_ops():
    ops = public_functions("reference")
    # The number that `sample` draws, and what a weight in codes stands for.
    for no_op in ("uniform", "apart", "dequantize"):
        del ops[no_op]
    for backend in ("kernels", "cpu.ops"):
        functions = public_functions(backend)
        assert {name: functions.get(name) for name in ops} == ops
        assert set(functions) == set(ops)
    text = "".join(ast.unparse(tree_of(FILES[name])) for name in set(FILES) - OPS)
    used = set(re.findall(r"\bops\.([a-z_]+)\(", text))
    # keys_of is for those who look into a pool from outside, too; round_inputs is called by products with codes
    assert used | {"keys_of", "round_inputs"} == set(ops)


def test_ops_import_nothing_of_ours_but_ops():
    assert all(
        ours(tree_of(path)) <= OPS for name, path in FILES.items() if name in OPS and not name.startswith("cpu.")
    )


def test_only_startup_picks_the_ops():
    for name, path in FILES.items():
        if name not in OPS | {"device.start", "device.startup"}:
            assert not ours(tree_of(path)) & OPS - {"cpu.weights", "cpu.machine"}


def test_scripts_shadow_no_file_of_the_root():
    """A script's own folder comes first on sys.path, so a bench/engine.py would hide the engine."""
    for folder in ("bench", "demo"):
        assert not {path.stem for path in (ROOT / folder).glob("*.py")} & {*FILES, *ROOMS}
        assert not (ROOT / folder / "__init__.py").exists()


def test_public_things_have_docstrings_and_annotations():
    def check(body, where):
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            name = f"{where}.{node.name}"
            if isinstance(node, ast.ClassDef):
                assert ast.get_docstring(node), f"{name} has no docstring"
                check(node.body, name)
            elif not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                assert node.returns is not None, f"{name} does not say what it returns"
                for arg in node.args.args:
                    assert arg.annotation is not None or arg.arg == "self" or arg.arg == "cls", f"{name}({arg.arg})"

    for path in (*FILES.values(), *ROOT.glob("bench/*.py")):
        assert ast.get_docstring(tree_of(path)), path
        check(tree_of(path).body, path.stem)


def test_no_globals_and_no_todo():
    for path in EVERY_FILE:
        assert not [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Global)], path
        assert "TO" + "DO" not in path.read_text(), path


@pytest.mark.parametrize("path", EVERY_FILE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    """Of a function, lines of code count, not its docstring, comments and blank lines."""
    lines = path.read_text().splitlines()
    if path not in (ROOT / "kernels.py", ROOT / "reference.py"):
        assert len(lines) <= MOST_FILE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = range(node.body[0].lineno, node.body[0].end_lineno + 1) if ast.get_docstring(node) else ()
            numbers = [n for n in range(node.lineno, node.end_lineno + 1) if n not in docstring]
            code = [n for n in numbers if not re.match(r"\s*(#|$)", lines[n - 1])]
            assert len(code) <= MOST_FUNCTION_LINES, f"{node.name} has {len(code)} lines of code"


SEEDS_HEAD = ["| vLLM | ours | file | what differs |", "|---|---|---|---|"]


@functools.cache
def defined_in(path: Path) -> set[str]:
    """Functions, constants and classes of a file, `Class.name` for what a class has, and variables that it reads."""

    def made_by(node: ast.AST) -> set[str]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return {node.name}
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        return {part.id for target in targets if target for part in ast.walk(target) if isinstance(part, ast.Name)}

    tree = tree_of(path)
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    defined = {text for text in texts if re.fullmatch("MANTA_[A-Z0-9_]+", text)}
    for node in tree.body:
        defined |= made_by(node)
        if isinstance(node, ast.ClassDef):
            parts = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
            stored = {ast.unparse(part) for part in parts if isinstance(part.ctx, ast.Store)}
            attributes = {name.removeprefix("self.") for name in stored if re.fullmatch(r"self\.\w+", name)}
            attributes = attributes.union(*map(made_by, node.body))
            defined |= {f"{node.name}.{name}" for name in attributes}
    return defined


def faults_of_row(line: str) -> list[str]:
    """What is wrong with a row of docs/seeds.md, each in a line."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if len(cells) != 4 or not cells[0]:
        return [f"{line}: it must have four cells, with vLLM's name in the first"]
    theirs, ours, where, why = cells
    if ours == where == "-":
        return [] if why else [f"{theirs}: neither a name nor a reason"]
    names, files = (re.findall("`([^`]+)`", cell) for cell in (ours, where))
    if [ours, where] != [", ".join(f"`{name}`" for name in found) for found in (names, files)]:
        return [f"{theirs}: names and files must be in backticks, with commas between"]
    there = {file: defined_in(ROOT / file) if (ROOT / file).is_file() else set() for file in files}
    lost = [f"{theirs}: {name} is not in {where}" for name in names if name not in set().union(*there.values())]
    return lost or [f"{theirs}: {file} has none of {ours}" for file in files if there[file].isdisjoint(names)]


def faults_of_seeds(text: str) -> list[str]:
    """What is wrong with docs/seeds.md, whose chapters (##) have parts (###) with a table each."""
    faults = []
    for chapter in re.split("^## ", text, flags=re.MULTILINE)[1:]:
        for part in re.split("^### ", chapter, flags=re.MULTILINE)[1:] or [chapter]:
            head, rule, *rows = [line for line in part.splitlines() if line.startswith("|")] or ["", ""]
            if [head, rule] != SEEDS_HEAD or not rows:
                faults.append(f"{part.partition(chr(10))[0]}: there is no table with rows")
            faults += [fault for row in rows for fault in faults_of_row(row)]
    return faults


def test_the_page_of_vllms_names_has_only_names_that_are_there():
    text = (ROOT / "docs" / "seeds.md").read_text()
    assert len(re.findall("^## ", text, re.MULTILINE)) == 5
    faults = faults_of_seeds(text)
    assert not faults, "docs/seeds.md:\n" + "\n".join(faults)


def test_the_names_that_vllms_readers_know_have_rows():
    """Each name in the list is in the first column of the page, with a name of ours or the reason why there is none."""
    cells = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "seeds.md").read_text(), re.MULTILINE)
    found = set(re.findall("`([^`]+)`", "\n".join(cells)))
    names = (ROOT / "tests" / "data" / "vllm_names.txt").read_text().split()
    assert names and not [name for name in names if name not in found]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= MOST_README_WORDS


def test_every_option_is_described_in_one_line():
    import config
    from api import options
    from commands import flags

    text = flags.OptionParser(config.EngineConfig, options.ServerConfig).format_help()
    assert "--max-num-seqs" in text and "--no-enable-prefix-caching" in text
    for cls in (config.EngineConfig, options.ServerConfig):
        for field in dataclasses.fields(cls):  # what has no help is set by the engine itself
            assert ("--" + field.name.replace("_", "-") in text) == bool(field.metadata["help"])


EMPTY_NAMES = {
    "aside", "asked", "each", "found", "given", "heed", "known", "late", "luck", "met", "more", "nap", "own", "owing",
    "said", "told", "trial", "wrong",
}  # fmt: skip


def test_names_say_what_their_values_are() -> None:
    """In a function that is longer than a glance, nothing is called by a word that fits anything."""
    empty = []
    for name, path in FILES.items():
        for function in ast.walk(tree_of(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                assert function.end_lineno
                if function.end_lineno - function.body[0].lineno >= 5:
                    stored = (x for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
                    empty += [f"{name}:{x.lineno}: {x.id}" for x in stored if x.id in EMPTY_NAMES]
    assert not empty
