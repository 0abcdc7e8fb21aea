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
MAY_IMPORT = {  # our own modules that each file may import, in the groups of the reader's table
    # faces
    "server": {
        "batch", "bodies", "client", "config", "control", "executor", "flags", "fleet", "hosts", "hub", "logs",
        "model_config", "openapi", "processes", "protocol", "reading", "replies", "responses", "serving", "startup",
        "telemetry", "terminal", "tokenizer", "torchrun"},
    "batch": {
        "bodies", "client", "config", "executor", "flags", "fleet", "hosts", "hub", "logs", "model_config",
        "processes", "protocol", "reading", "replies", "serving", "tokenizer", "torchrun"},
    "terminal": {
        "async_llm", "client", "config", "flags", "hub", "model_config", "pooling", "sampling_params", "tokenizer"},
    "flags": {"config"},
    "serving": {
        "checks", "config", "messages", "outputs", "processes", "protocol", "reading",
        "replies", "responses", "sampling_params", "structure", "tokenizer", "viewers"},
    "viewers": {"checks", "client", "config", "metrics", "processes", "protocol", "replies"},
    "control": {"client", "config", "processes", "protocol"},
    "bodies": {"config", "protocol"},
    "protocol": {"checks", "config", "messages", "sampling_params", "structure"},
    "checks": {"config", "messages", "sampling_params"},
    "structure": {"checks", "config", "sampling_params"},
    "reading": {
        "checks", "config", "outputs", "protocol", "sampling_params", "scanning", "schemas", "structure",
        "tokenizer", "tools"},
    "openapi": {"config", "protocol", "responses"},
    "messages": set(),
    "responses": {"checks", "config", "outputs", "protocol", "reading", "replies"},
    "replies": {
        "checks", "client", "data_parallel", "logprobs", "logs", "messages", "outputs", "plan", "protocol",
        "reading", "sampling_params", "tokenizer"},
    "telemetry": {"logs", "replies"},
    "logprobs": {"checks", "outputs", "plan", "sampling_params", "tokenizer"},
    "tokenizer": {"messages", "templates", "vocabularies"},
    "tools": {"lark_rules", "scanning", "tool_formats"},
    "tool_formats": {"lark_rules", "scanning"},
    "lark_rules": {"schemas"},
    "scanning": set(),
    "vocabularies": set(),
    "templates": set(),
    "prompts": {"outputs", "plan", "sampling_params", "tokenizer"},
    "outputs": {"plan", "sampling_params", "tokenizer"},
    # engine
    "engine": {
        "client", "config", "core", "fleet", "hub", "logs", "messages", "outputs", "plan", "prompts", "ring",
        "sampling_params", "tokenizer"},
    "async_llm": {
        "client", "config", "engine_process", "hub", "logs", "model_config", "outputs", "plan", "processes", "prompts",
        "ring", "sampling_params", "tokenizer"},
    "core": {
        "admission", "config", "executor", "grammar", "journal", "live", "logs", "model_config", "plan",
        "pooling", "ray_executor", "ring", "sampling_params", "scheduler", "sequence", "torchrun", "tracing"},
    "grammar": {"client", "executor", "plan", "sampling_params", "schemas", "sequence", "tokenizer"},
    "schemas": {"sampling_params"},
    "engine_process": {
        "client", "config", "core", "data_parallel", "executor", "logs", "plan", "processes", "ring", "torchrun"},
    "fleet": {
        "client", "config", "data_parallel", "engine_process", "executor", "hosts", "logs", "model_config", "plan",
        "processes", "ray_hosts"},
    "hosts": {"client", "config", "executor", "logs", "plan", "processes", "ring"},
    "ray_hosts": {"config", "engine_process", "executor", "hosts", "logs", "processes", "ray_executor", "ray_hosts"},
    "client": {"logs", "plan", "ring"},
    "processes": {"client", "config", "executor", "logs", "plan", "ring"},
    "data_parallel": {"client", "executor", "plan", "processes", "ring", "sequence"},
    # deciding
    "config": {"logs"},
    "logs": set(),
    "families": set(),
    "config_fields": {"families"},
    "model_config": {"config", "config_fields", "families", "kv_layout", "quantization", "sizes"},
    "hub": {"config", "logs", "model_config"},
    "sizes": set(),
    "quantization": set(),
    "sampling_params": {"config"},
    "plan": {"sampling_params"},
    "pooling": {"config", "model_config", "sampling_params"},
    "sequence": {"beam", "plan", "sampling_params"},
    "queues": {"sequence"},
    "metrics": {"sequence"},
    "scheduler": {"admission", "beam", "config", "kv_cache", "metrics", "plan", "queues", "sequence"},
    "admission": {"config", "kv_cache", "plan", "queues", "sequence"},
    "kv_cache": {"config", "kv_layout", "plan", "sequence"},
    "kv_layout": set(),
    "beam": set(),
    "live": {"plan", "scheduler", "sequence"},
    "journal": {"config", "plan", "sampling_params", "scheduler", "sequence"},
    # carrying
    "executor": {"config", "logs", "model_config", "plan", "ring", "startup"},
    "ray_executor": {"config", "executor", "hub", "logs", "model_config", "plan", "ring"},
    "torchrun": {"config", "executor", "logs", "model_config", "plan", "ring"},
    "ring": {"plan"},
    # device
    "worker": {
        "batch_state", "compile_guard", "config", "cpu", "memory", "model", "model_config", "parallel", "plan",
        "sampling_params", "sanitizer"},
    "startup": {
        "batch_state", "compile_guard", "config", "cpu", "cpu_compiled", "cpu_ops", "kernels", "loader", "logs",
        "memory", "model", "model_config", "parallel", "plan", "pooling", "reference", "sampling_params", "upkeep",
        "worker"},
    "upkeep": {"batch_state", "cpu", "loader", "model", "plan", "sanitizer", "worker"},
    "compile_guard": set(),
    "batch_state": {"cpu", "plan", "sampling_params"},
    "model": {"delta_net", "latent_attention", "layers", "model_config", "parallel", "rope"},
    "layers": {"families", "model_config", "parallel"},
    "latent_attention": {"layers", "model_config"},
    "delta_net": {"layers", "model_config"},
    "rope": {"sizes"},
    "loader": {"dequantize", "hub", "model"},
    "dequantize": {"quantization"},
    "memory": {
        "batch_state", "config", "cpu", "kv_layout", "latent_attention", "model", "model_config", "parallel", "sizes"},
    "parallel": {"config", "plan"},
    "sanitizer": {"plan"},
    "tracing": {"config", "plan"},
    # ops: cpu_ops takes from the specification what a CPU does no faster
    "kernels": {"delta", "experts", "latent", "matmul", "sampling"},
    "latent": {"matmul"},
    "delta": {"matmul"},
    "experts": {"matmul"},
    "sampling": {"matmul"},
    "matmul": set(),
    "reference": set(),
    "cpu_ops": {"cpu", "cpu_delta", "cpu_experts", "cpu_sampling", "reference"},
    "cpu_sampling": {"reference"},
    "cpu_experts": {"cpu"},
    "cpu_compiled": {"cpu", "cpu_ops", "logs", "reference"},
    "cpu_delta": set(),
    "cpu": set(),
    # beside
    "setup": set(),
}  # fmt: skip
STDLIB_ONLY = {
    "admission", "beam", "config", "config_fields", "families", "kv_cache", "kv_layout", "live", "logs", "metrics",
    "model_config", "plan", "pooling", "quantization", "queues", "sampling_params", "scheduler", "sequence", "sizes",
}  # fmt: skip
DEVICE = {
    "worker", "upkeep", "startup", "compile_guard", "batch_state", "model", "layers", "latent_attention", "delta_net",
    "rope", "loader", "dequantize", "memory", "parallel", "sanitizer",
}  # fmt: skip
# These define what kernels and cpu_ops pass on.
HOMES_OF_OPS = {
    "reference", "matmul", "sampling", "experts", "latent", "delta", "cpu_experts", "cpu_delta",
    "cpu_sampling",
}  # fmt: skip
TORCH_FREE = set(MAY_IMPORT) - DEVICE - HOMES_OF_OPS - {"kernels", "cpu_compiled", "cpu_ops", "cpu"}
FILES = {path.stem: ast.parse(path.read_text()) for path in ROOT.glob("*.py")}
BENCHES = {path.stem: ast.parse(path.read_text()) for path in ROOT.glob("bench/*.py")}
EVERY_FILE = [path for folder in (".", "bench", "demo", "tests") for path in sorted((ROOT / folder).glob("*.py"))]
MOST_ROOT_FILES, MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_README_WORDS = 94, 700, 80, 750


def imports(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_every_file_has_its_place():
    assert set(FILES) == set(MAY_IMPORT)


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_imports_keep_to_the_table(name):
    found = imports(FILES[name])
    assert found & set(FILES) <= MAY_IMPORT[name]
    if name in STDLIB_ONLY:
        assert found - set(FILES) <= set(sys.stdlib_module_names)
    if name in TORCH_FREE:
        assert not found & {"torch", "triton"}


def test_importing_the_engine_leaves_torch_alone():
    """2 s and 300 MB that an API process does not pay."""
    code = "import sys, async_llm, engine, server; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def public_functions(name: str) -> dict[str, list[str]]:
    """The parameters of each public function of a module, those that it imports from another file of ops among them."""
    found = {}
    for node in FILES[name].body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.decorator_list:
            found[node.name] = [arg.arg for arg in node.args.args]
        elif isinstance(node, ast.ImportFrom) and node.module in HOMES_OF_OPS:
            specified = public_functions(node.module)
            found |= {alias.name: specified[alias.name] for alias in node.names if alias.name in specified}
    return found


def test_every_backend_has_the_specifications_ops():
    ops = public_functions("reference")
    del ops["uniform"]  # the number that `sample` draws, which is no op
    for backend in ("kernels", "cpu_ops"):
        found = public_functions(backend)
        assert {name: found.get(name) for name in ops} == ops
        assert set(found) == set(ops)
    text = "".join(
        (ROOT / f"{name}.py").read_text()
        for name in ("batch_state", "delta_net", "latent_attention", "layers", "model", "worker", "startup")
    )
    used = set(re.findall(r"\bops\.([a-z_]+)\(", text))
    # keys_of is for those who look into a pool from outside, too.
    assert used | {"keys_of"} == set(ops)


def test_only_startup_picks_the_ops():
    for name, tree in (FILES | BENCHES).items():
        # The bench compares them.
        if name not in ("startup", "kernels", "cpu_compiled", "cpu_ops", "bench_kernels", "gpu_check", *HOMES_OF_OPS):
            assert not imports(tree) & {"kernels", "cpu_ops", *HOMES_OF_OPS}


def test_scripts_shadow_no_file_of_the_root():
    """A script's own folder comes first on sys.path, so a bench/engine.py would hide the engine."""
    for folder in ("bench", "demo"):
        assert not {path.stem for path in (ROOT / folder).glob("*.py")} & set(FILES)
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

    for name, tree in (FILES | BENCHES).items():
        assert ast.get_docstring(tree), name
        check(tree.body, name)


def test_no_globals_and_no_todo():
    for path in EVERY_FILE:
        text = path.read_text()
        assert not [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Global)], path
        assert "TO" + "DO" not in text, path


def test_the_root_has_few_files():
    assert len(FILES) <= MOST_ROOT_FILES


@pytest.mark.parametrize("path", EVERY_FILE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    """Of a function, lines of code count, not its docstring, comments and blank lines."""
    text = path.read_text()
    lines = text.splitlines()
    if path not in (ROOT / "kernels.py", ROOT / "reference.py"):
        assert len(lines) <= MOST_FILE_LINES
    for node in ast.walk(ast.parse(text)):
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

    tree = ast.parse(path.read_text())
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    found = {text for text in texts if re.fullmatch("MANTA_[A-Z0-9_]+", text)}
    for node in tree.body:
        found |= made_by(node)
        if isinstance(node, ast.ClassDef):
            parts = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
            stored = {ast.unparse(part) for part in parts if isinstance(part.ctx, ast.Store)}
            own = {name.removeprefix("self.") for name in stored if re.fullmatch(r"self\.\w+", name)}
            own = own.union(*map(made_by, node.body))
            found |= {f"{node.name}.{name}" for name in own}
    return found


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
    assert len(re.findall("^## ", text, re.MULTILINE)) == 4
    faults = faults_of_seeds(text)
    assert not faults, "docs/seeds.md:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (["| `a` | `Scheduler.schedule`, `Scheduler.running` | `scheduler.py` | |"], None),
        (["| `a` | `Scheduler.schedule`, `Status.SWAPPED` | `scheduler.py`, `sequence.py` | |"], None),
        (["| `a` | `StepPlan.rows`, `bit_words`, `TAGS` | `plan.py` | |", "| `b` | - | - | because |"], None),
        (["| `a` | `MANTA_WORKER_MULTIPROC_METHOD` | `executor.py` | |"], None),
        (["| `a` | `Scheduler.schedul` | `scheduler.py` | |"], "Scheduler.schedul is not in `scheduler.py`"),
        (["| `a` | `Scheduler.schedule` | `scheduler.py`, `plan.py` | |"], "plan.py has none of `Scheduler.schedule`"),
        (["| `a` | `Scheduler.schedule` | `nowhere.py` | |"], "Scheduler.schedule is not in `nowhere.py`"),
        (["| `a` | Scheduler.schedule | `scheduler.py` | |"], "in backticks"),
        (["| `a` | `Scheduler.schedule` | - | |"], "in backticks"),
        (["| `a` | - | - | |"], "neither a name nor a reason"),
        (["| `a` | - | - |"], "four cells"),
        ([], "no table"),
    ],
)  # fmt: skip
def test_a_wrong_row_of_that_page_is_found(rows, fault):
    found = faults_of_seeds("\n".join(["## 1", "### file", *SEEDS_HEAD, *rows]))
    assert found == [] if fault is None else any(fault in line for line in found)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= MOST_README_WORDS


def test_every_option_is_described_in_one_line():
    import config
    import flags

    text = flags.OptionParser(config.EngineConfig, config.ServerConfig).format_help()
    assert "--max-num-seqs" in text and "--no-enable-prefix-caching" in text
    for cls in (config.EngineConfig, config.ServerConfig):
        for field in dataclasses.fields(cls):  # what has no help is set by the engine itself
            assert ("--" + field.name.replace("_", "-") in text) == bool(field.metadata["help"])
