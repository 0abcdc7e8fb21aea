"""What each worker does to read adapters beside its steps; the engine has its functions called, see `registry.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from observe.logs import logger

if TYPE_CHECKING:
    from device.upkeep import KeptWorker


def load_adapter(worker: KeptWorker, row: int, state: str) -> int | str:
    """Read an adapter into a row of the host's memory; returns what `Adapters.load` does, or what went wrong."""
    assert worker.adapters
    try:
        return worker.adapters.load(row, state)
    except ValueError as error:  # a client's mistake, and no failure of a call, which is logged with its traceback
        return str(error)
    except Exception as error:  # of the disk, or of memory
        folder = state.partition("\0")[0]
        logger.warning(f"{folder} could not be read", exc_info=True)
        return f"{folder} could not be read: {error!r:.200}"


def begin_load(worker: KeptWorker, row: int, state: str) -> None:
    """Have a thread do what `load_adapter` does, beside the steps; no step uses the row meanwhile."""
    moved = None
    if worker.device == "cuda":  # steps that were launched may have yet to copy what the row has held
        from torch.cuda import current_stream  # here, because engines do not load torch

        moved = current_stream().record_event()

    def load() -> int | str:
        if moved:
            moved.synchronize()
        return load_adapter(worker, row, state)

    worker.loads[row] = worker.readers.submit(load)


def finished_loads(worker: KeptWorker) -> dict[int, int | str]:
    """What `load_adapter` has returned for each row that `begin_load` has filled, if it is done."""
    return {row: load.result() for row, load in worker.loads.items() if load.done()}
