"""Makes the package `manta` from the files of this folder and the folders in it, which import each other by bare names.

Installed as they are, they would claim names like `config` and `models` in every program. So their copies go into one
package, and there `from config import say` reads `from manta.config import say`, and `import config` reads
`from manta import config`. That binds the same names, so nothing else has to change.
"""

import ast
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
ROOMS = [path.parent.name for path in sorted(ROOT.glob("*/__init__.py"))]
FOLDERS = {"manta": "."} | {f"manta.{name}": name for name in ("bench", "demo", *ROOMS)}
HOMES = {path.stem: f"manta.{folder}" for folder in ("bench", "demo") for path in (ROOT / folder).glob("*.py")}
HOMES |= dict.fromkeys([*ROOMS, *(path.stem for path in ROOT.glob("*.py"))], "manta")
INIT = '''"""An LLM inference engine: `from manta import LLM, SamplingParams`, or the command `manta`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manta.async_llm import AsyncLLM as AsyncLLM
    from manta.engine import LLM as LLM
    from manta.engine import LoRARequest as LoRARequest
    from manta.engine import SamplingParams as SamplingParams

MODULES = {"AsyncLLM": "async_llm", "LLM": "engine", "LoRARequest": "engine", "SamplingParams": "engine"}


def __getattr__(name: str) -> Any:  # each of our processes imports this file, and most of them need none of these
    if module := MODULES.get(name):
        return getattr(importlib.import_module(f"manta.{module}"), name)
    raise AttributeError(f"module 'manta' has no attribute {name!r}")


def __dir__() -> list[str]:  # what a notebook completes
    return sorted([*globals(), *MODULES])
'''


def packaged(source: str) -> str:
    """The text of a module with its imports of our other modules as they are in the package."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and (home := HOMES.get(node.module.partition(".")[0])):
            old, new = f"from {node.module} import", f"from {home}.{node.module} import"
        elif isinstance(node, ast.Import) and (name := node.names[0].name) in HOMES:
            old, new = f"import {name}", f"from {HOMES[name]} import {name}"
        else:
            continue
        line, at = lines[node.lineno - 1], node.col_offset
        assert line.startswith(old, at), f"{line!r} is not written as the formatter does it"
        lines[node.lineno - 1] = line[:at] + new + line[at + len(old) :]
    return "\n".join(lines)


class BuildPackage(build_py):
    """The build step that copies modules."""

    def run(self) -> None:
        """Copy all modules and data."""
        if self.editable_mode:
            raise SystemExit("Manta cannot be installed editable; a script beside engine.py needs no installation")
        shutil.rmtree(self.build_lib, ignore_errors=True)  # else what is gone since an earlier build would be packed
        super().run()
        Path(self.build_lib, "manta", "setup.py").unlink()
        # Without this file Python would look for the package's modules in any folder called manta as well, say a clone.
        version = f'\n\n__version__ = "{self.distribution.get_version()}"\n'
        Path(self.build_lib, "manta", "__init__.py").write_text(INIT + version, encoding="utf-8")
        Path(self.build_lib, "manta", "py.typed").touch()  # type checkers read the annotations

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        """Copy one module."""
        target, copied = super().build_module(module, module_file, package)
        Path(target).write_text(packaged(Path(module_file).read_text(encoding="utf-8")), encoding="utf-8")
        return target, copied


setup(
    packages=list(FOLDERS),
    package_dir=FOLDERS,
    package_data={"manta": ["demo/**/*.json*", "demo/**/*.safetensors", "web/*"]},
    include_package_data=False,
    cmdclass={"build_py": BuildPackage},
)
