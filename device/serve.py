"""A worker's loop in a process of its own: it takes plans and calls, and returns results.

torch is imported where the worker is made, and not before.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from functools import partial
from multiprocessing import spawn
from typing import Any

from config import EngineConfig, HookError
from model_config import ModelConfig
from observe.logs import logger
from plan import Call, CallError, Reply, StepPlan, StepResult
from ring import BEAT, Codec, RingBuffer

NEVER = 1e9  # seconds
LOOK = 2e-5  # seconds to look for another plan before asking the device again whether a step is done
SLOWEST = 20  # a step may take this many times as long as warm-up's largest: busy machine, cold cache, other lengths
MIN_STEP_TIMEOUT = 30.0  # seconds; a step of milliseconds may take this long once, on a machine that swaps
STARTING = threading.Lock()  # held while a worker's process starts
SCRIPT = ("init_main_from_name", "init_main_from_path")  # multiprocessing's words for the script to import


def step_timeout(config: EngineConfig, step_seconds: float) -> float:
    """Seconds that a step may take: the option, or else a multiple of what warm-up's largest step took."""
    return config.step_timeout or max(MIN_STEP_TIMEOUT, round(SLOWEST * step_seconds, 1))


def settle_torch() -> None:
    """Set the variables that torch reads when it is loaded, unless the environment has them."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch takes huge pages for large tensors, which read faster
    # A thread of libgomp that waits for work keeps its core for some 0.1 ms. With the default it takes longer than the
    # engine needs to plan; and beside other processes that want the cores, threads wait for each other's turns.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # torch and oneDNN each keep prepared products of the latest sizes, some 0.3 MB for each: by default 1,024, which
    # take hours of mixed lengths to fill, and leave holes in malloc's memory.
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")


def new_worker(config: EngineConfig, model_config: ModelConfig, rank: int = 0, rendezvous: str = "") -> Any:
    """A `Worker` that is ready, and gives up an exchange with other ranks after `step_timeout` seconds, as all of them
    do. This imports torch."""
    settle_torch()
    begun = time.perf_counter()
    from device.startup import start_worker

    seconds = time.perf_counter() - begun
    worker = start_worker(config, model_config, rank, rendezvous)
    worker.info["startup"] = {"imports": round(seconds, 3)} | worker.info["startup"]
    worker.info["step_timeout"] = step_timeout(config, worker.info["step_seconds"] + worker.info["tower_seconds"])
    worker.group.set_timeout(worker.info["step_timeout"])
    return worker


def work(
    config: EngineConfig, model_config: ModelConfig, rank: int, rendezvous: str, plans: RingBuffer, results: RingBuffer,
    script: dict[str, str] | None,
) -> None:  # fmt: skip
    """Make a worker; take plans and return results until this process ends.

    Args:
        plans, results: a reader's and a writer's end.
        script: see `answer`.
    """
    from tqdm import tqdm  # here, because a plan does without

    tqdm.set_lock(threading.RLock())  # the default is a named semaphore, which a kill would leave behind
    codec = Codec()
    threading.Thread(target=keep_beating, args=(results,), daemon=True).start()

    send = partial(results.write, timeout=NEVER)
    try:
        worker = new_worker(config, model_config, rank, rendezvous)
    except ValueError as error:
        return send(codec.encode(Reply(0, error=str(error))))
    from parallel import PeersGone, RankGone

    send(codec.encode(Reply(0, worker.facts())))
    launched: deque[Any] = deque()
    while True:
        try:
            if launched and launched[0].ready():
                send(codec.encode(launched.popleft().result()))
            elif data := plans.read(LOOK if launched else NEVER):  # a plan may come while the device runs another
                message = codec.decode(data)
                if isinstance(message, StepPlan):
                    launched.append(worker.launch(message))
                else:
                    send(answer(worker, message, codec, script))
        except (PeersGone, RankGone, HookError) as error:  # of what happened elsewhere there is no traceback here
            kind: Any = type(error).__name__
            return send(codec.encode(Reply(0, error=str(error), raised=kind)))
        except Exception as error:
            send(codec.encode(Reply(0, error=f"{type(error).__name__}: {error}")))
            raise


def answer(worker: Any, message: StepPlan | Call, codec: Codec, script: dict[str, str] | None = None) -> bytes:
    """A worker's reply to a message. A function in `__main__` is imported from `script`; None: it is here already, or
    no function comes. Raises RankGone if other ranks are lost meanwhile."""
    from parallel import RankGone

    if isinstance(message, StepPlan):
        return codec.encode(run_step(worker, message))
    try:
        if script is not None and b"__main__" in message.function:
            import_script(script)
        return codec.encode(Reply(message.call_id, message.run(worker)))
    except Exception as error:  # the caller hears of it
        if isinstance(error.__cause__, RankGone):
            raise error.__cause__ from None
        if failed := isinstance(error, CallError):
            logger.warning(str(error), exc_info=True)
        return codec.encode(Reply(message.call_id, error=str(error), raised="CallError" if failed else ""))


def run_step(worker: Any, plan: StepPlan) -> StepResult:
    """The result of a step on a rank that nobody ends from outside.

    Raises:
        RankGone: it takes more than `step_timeout` seconds. NCCL, and what a CUDA graph replays of it, wait for a
            lost rank for ever.
    """
    begun, launched, most = time.monotonic(), worker.launch(plan), worker.facts()["step_timeout"]
    while not launched.ready():
        if time.monotonic() > begun + most:
            with worker.group.exchange():
                raise RuntimeError(f"a step takes more than {most:g} s")
        time.sleep(LOOK)
    return launched.result()


def start_alone(process: Any) -> None:
    """Start a worker's process without the caller's script.

    multiprocessing makes a new Python import the script first, and a script without a `__main__` guard would then make
    another `LLM`. It has no option for this, so we take the script out of the note that it writes for the new process.
    """
    with STARTING:
        prepare = spawn.get_preparation_data

        def without_script(name: str) -> dict[str, Any]:
            note = prepare(name)
            return {key: note[key] for key in note if key not in SCRIPT} if name == process.name else note

        spawn.get_preparation_data = without_script
        try:
            process.start()
        finally:
            spawn.get_preparation_data = prepare


def import_script(script: dict[str, str]) -> None:
    """Import the caller's `script_of_caller` as multiprocessing would have done at first, unless it is here already."""
    if not script or not os.path.isfile(script.get("init_main_from_path", __file__)):
        raise ValueError(
            "method is a function of a notebook, of `python -c` or of standard input, which worker processes cannot "
            "import; it must be the name of a method, or a function of a module that they can import"
        )
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # as multiprocessing says it, see `MpExecutor`
    try:
        spawn.prepare(script)
    except SystemExit as error:
        raise ValueError(f"your script ended ({error.code}) when a worker imported it for its function") from None
    finally:
        del process._inheriting


def keep_beating(results: Any) -> None:
    """Count heartbeats for as long as this process lives and is not stopped, however long a step takes."""
    while True:
        results.beat()
        time.sleep(BEAT)


def script_of_caller() -> dict[str, str]:
    """What multiprocessing tells a new process, so that it imports this one's script; empty: it is in no file."""
    data = spawn.get_preparation_data("")
    return {key: data[key] for key in SCRIPT if key in data}
