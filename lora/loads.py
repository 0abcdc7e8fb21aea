"""What a worker does to read adapters beside its steps; `registry.py` is the engine's side."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lora.stacks import Adapters
from observe.logs import logger


class AdapterReader:
    """A worker that reads adapters. The engine calls these methods by their names."""

    device: str
    adapters: Adapters | None
    readers: ThreadPoolExecutor
    loads: dict[int, Future[int | str]]  # by the rows of the host's memory for adapters

    def load_adapter(self, row: int, state: str) -> int | str:
        """Read an adapter into a row of the host's memory; returns what `Adapters.load` does, or what went wrong."""
        assert self.adapters
        try:
            return self.adapters.load(row, state)
        except ValueError as error:  # a client's mistake, and no failure of a call, which is logged with its traceback
            return str(error)
        except Exception as error:  # of the disk, or of memory
            folder = state.partition("\0")[0]
            logger.warning(f"{folder} could not be read", exc_info=True)
            return f"{folder} could not be read: {error!r:.200}"

    def begin_load(self, row: int, state: str) -> None:
        """Have a thread do what `load_adapter` does, beside the steps; no step uses the row meanwhile."""
        moved = None
        if self.device == "cuda":  # steps that were launched may have yet to copy what the row has held
            moved = torch.cuda.current_stream().record_event()

        def load() -> int | str:
            if moved:
                moved.synchronize()
            return self.load_adapter(row, state)

        self.loads[row] = self.readers.submit(load)

    def finished_loads(self) -> dict[int, int | str]:
        """What `load_adapter` has returned for each row that `begin_load` has filled, if it is done."""
        return {row: load.result() for row, load in self.loads.items() if load.done()}
