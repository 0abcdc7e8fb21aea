"""Makes one prompt deadly: a worker that is to run it dies of a segmentation fault, as a bug in a kernel would have it.

Python runs this file when it starts, where this folder is in PYTHONPATH. Only tests put it there.
"""

import importlib.util
import os
import signal
import sys

DEADLY = [13, 11, 7, 5, 3, 2]  # how the prompt begins


class Poisoner:
    """Finds the module `worker`, and has its `launch` look for the deadly prompt first."""

    def find_spec(self, name, path=None, target=None):
        if name != "worker":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def poison(module):
            execute(module)
            launch = module.Worker.launch

            def deadly_launch(worker, plan):
                if any(row.token_ids[: len(DEADLY)] == DEADLY for row in plan.new):
                    os.kill(os.getpid(), signal.SIGSEGV)
                return launch(worker, plan)

            module.Worker.launch = deadly_launch

        spec.loader.exec_module = poison
        return spec


sys.meta_path.insert(0, Poisoner())
