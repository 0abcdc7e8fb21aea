"""Puts a worker to sleep between its steps, or gives it other weights.

Of the KV cache nothing outlasts a sleep, so its pools are dropped and made anew. How weights go depends on the backend:

    cpu      level 1 leaves them where they are, in host memory; level 2 drops the model, whose layouts are packed, and
             another one is made and packed where weights are needed again
    others   the tensors stay, so that all that refers to them stays right, and only the memory behind them comes and
             goes (`UntypedStorage.resize_`). On a GPU level 1 keeps a copy in pinned memory of the host

New weights are written over the old ones, where these are plain tensors; so CUDA graphs, in which their addresses are,
stay right. Memory that comes back after a sleep lies elsewhere, so the graphs are captured again then. (vLLM keeps the
addresses by CUDA's virtual memory, for which torch alone has no call.)
"""

from __future__ import annotations

import contextlib
import gc

import torch

from batch_state import BatchState
from checkpoints.tied_head import settle_head
from cpu import machine
from device.coded import unwrapped
from device.loader import find_weights
from device.start import Start
from device.warmup import capture
from lora.stacks import AdapterPool
from model import Transformer
from models.logprobs import LogprobGatherer
from models.pooled import Pooler
from models.quantized import QuantizedWeight
from parallel import Sampled
from plan import KV_CACHE, WEIGHTS
from speculation.drafter import Drafter
from speculation.proposer import add_draft, new_proposer, wanted_of
from worker import Worker

Pools = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class KeptWorker(Worker):
    """A worker with its `start`, which is needed again where memory or weights change. The `pools` are `pool`,
    `host_pool`, `states` and `host_states` of `Worker`."""

    def __init__(self, start: Start, pools: Pools, state: BatchState):
        config, model = start.config, start.model
        gatherer = LogprobGatherer(model.ops, model.config.vocab_size, config.max_samples)
        watch = start.guard.watch if start.guard else contextlib.nullcontext
        super().__init__(config, model, pools, state, gatherer, watch)
        self.start, self.lengths = start, [*map(len, pools)]
        self.adapters = start.adapters
        self.pooler, self.proposer = Pooler.of(config, model), new_proposer(config, model)
        self.arrange()
        self.asleep: set[str] = set()
        self.packed = self.ops.BACKEND == "cpu" or bool(model.coded)  # whether weights are not plain tensors
        self.dropped = False  # whether there are no weights
        self.emptied: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []  # each one's size, and copy

    def host_views(self, block: int) -> list[memoryview]:
        """The bytes of a host block, for files, and of its shadow if there is a sanitizer."""
        shadows = [self.sanitizer.host_shadow[block]] if self.sanitizer else []
        return [tensor.view(torch.uint8).numpy().data for tensor in (self.host_pool[block], *shadows)]

    # --- sleep --------------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Give memory back: that of the KV cache, and at level 2 that of the weights; on a GPU at level 1, too."""
        self.graphs.clear()
        self.pieces = None
        if isinstance(self.proposer, Drafter):
            self.proposer.graphs.clear()
        if KV_CACHE not in self.asleep:
            self.asleep.add(KV_CACHE)  # first, so that `wake_up` makes all of it anew if this fails
            self.take_sampled()  # what the last stage has sampled is on its way
            if self.disk:
                self.disk.give_up()
            self.rows = self.sanitizer = None
            self.images.clear()
            self.pool, self.states = self.pool[:1].clone(), self.states[:0].clone()  # a block's size may be asked for
            if self.device == "cpu":  # what is pinned beside a GPU stays
                self.host_pool, self.host_states = self.host_pool[:0].clone(), self.host_states[:0].clone()
            self.state = self.start.new_state(1)
            self.sampled = Sampled(self.state, self.pipeline)
        if level == 2:
            self.drop_weights()
        elif self.device == "cuda" and not self.dropped:
            self.empty(keep=True)
        self.asleep.add(WEIGHTS)
        self.arrange()
        self.give_back()

    def wake_up(self, tags: list[str], source: str) -> None:
        """Take memory for what the tags name again, if it sleeps, and fill it. See `load_weights` for the source."""
        if WEIGHTS in tags and self.dropped:
            self.load_weights(source)
        if WEIGHTS in tags:
            for storage, size, copy in self.emptied:
                if copy is not None:  # else `sleep` has failed before it took this away
                    storage.resize_(size)
                    storage.copy_(copy.untyped_storage())
            self.emptied.clear()
            self.asleep.discard(WEIGHTS)
        if KV_CACHE in tags and KV_CACHE in self.asleep:
            self.asleep.discard(KV_CACHE)  # first, so that `sleep` takes back what there is if this fails
            start, (blocks, host_blocks, rows, host_rows) = self.start, self.lengths
            self.pool, self.states = start.new_pool(blocks), start.new_states(rows)
            if self.device == "cpu":
                self.host_pool = torch.empty(host_blocks, *start.block_shape(), dtype=start.model.kv_dtype)
                self.host_states = torch.empty(host_rows, start.model.state_size)
            self.state = start.new_state(self.config.max_num_seqs)
            self.sampled = Sampled(self.state, self.pipeline)
            self.sanitize()
        self.capture_missing()

    def capture_missing(self) -> None:
        """Capture the graphs that are not there, once nothing sleeps any more."""
        if self.graph_sizes and not self.graphs and not self.asleep:
            with self.watch():
                capture(self.start, self)

    def give_back(self) -> None:
        """Give the system what torch and malloc keep for later."""
        if self.device == "cuda":
            torch.cuda.empty_cache()
        else:
            machine.release()

    # --- weights ------------------------------------------------------------------------------------------------------

    def drop_weights(self) -> None:
        """Give up the weights; the model's shape stays."""
        self.dropped = True
        if not self.packed:
            self.empty(keep=False)
        else:
            self.emptied.clear()
            self.start.parameters = self.start.draft_parameters = {}  # which hold what is plain
            self.model = self.start.model = self.new_model()
            if self.adapters:  # which refer to the old model, as it does to them
                wanted = self.model.parameters()
                self.start.adapters = self.adapters = AdapterPool.of(self.config, self.model, wanted, self.adapters)
            self.proposer = new_proposer(self.config, self.model)  # the old one has the old draft
            self.arrange()
            gc.collect()

    def empty(self, keep: bool) -> None:
        """Take the memory of plain weights away, and `keep` a copy on the host, or none."""
        if not self.emptied:
            parts = [*self.start.parameters.values(), *self.start.draft_parameters.values()]
            targets = [piece.target for part in parts for piece in part.pieces if not piece.target.is_meta]
            weights = [unwrapped(value) for owner in self.model.owners() for value in vars(owner).values()]
            coded = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
            targets += [tensor for weight in coded for tensor in weight.tensors()]
            storages = {storage.data_ptr(): storage for storage in (target.untyped_storage() for target in targets)}
            self.emptied = [(storage, storage.nbytes(), None) for storage in storages.values()]
        for i, (storage, size, copy) in enumerate(self.emptied):
            if keep and copy is None:
                copy = machine.pinned(size)
                copy = torch.empty(size, dtype=torch.uint8) if copy is None else copy  # it comes back more slowly
                copy.untyped_storage().copy_(storage)
            self.emptied[i] = storage, size, copy if keep else None
            storage.resize_(0)

    def new_model(self) -> Transformer:
        """A model of the same shape, on a GPU without memory. On a CPU its weights take none until they are written."""
        s, coded = self.start, self.model.coded
        device = "meta" if self.device == "cuda" and not coded else self.device
        with torch.device(device):  # for tensors that are made without a device
            sizes = self.model.max_model_len, s.group, coded
            model = Transformer(s.model_config, s.ops, device, self.model.dtype, *sizes)
            add_draft(s.config, model, s.config.checkpoint)
        return model

    def check_weights(self, source: str) -> None:
        """Check by the headers of a source's files whether `load_weights` could take it. Errors are those of
        `find_weights`, or that it has a head of its own, and this model has none."""
        model = self.new_model()
        find_weights(model, source, wanted_of(self.config, model))
        if settle_head(source, model.config) != model.config:
            raise ValueError(f"{source} has a head that is not its table of embeddings; this engine's model is tied")

    def load_weights(self, source: str) -> None:
        """Replace the weights by those of a folder or a safetensors file; "" means those of the start. Errors are those
        of `check_weights`, or that a tensor is not finite; then some of the weights are new."""
        start = self.start
        if not self.packed:
            for storage, size, _ in self.emptied:
                storage.resize_(size)
            self.emptied.clear()
            start.fill(source)
        else:
            self.drop_weights()  # first, so that the old and the new ones never take memory at once
            self.give_back()
            self.graphs.clear()  # which know where the old ones were
            self.pieces = None
            start.list_parameters()
            start.fill(source)
            # The embeddings are not served from the mapped files, because whoever updates weights writes files anew.
            start.arrange([])
            self.adapters = start.adapters
        self.dropped = False
        self.asleep.discard(WEIGHTS)
        self.arrange()
        self.capture_missing()
        self.give_back()
