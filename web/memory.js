/**
 * What the page remembers of the engines, and which of them it shows.
 *
 * @typedef {{rank: number, num_blocks: number, blocks: [number, number][], requests: Object[], steps: Object[],
 *   finished: Object[], counts: Object<string, number>, counters: Object<string, number>, moves: Object}} Engine
 *   one engine in an event of /live; `blocks` are runs of [owner, length], and owners are in OWNERS or a request's key
 */

export const OWNERS = { 0: "free", "-1": "cached", "-2": "shared" };
export const MOST_STEPS = 120;
export const MOST_FINISHED = 60;
export const SPAN = 60; // seconds that the plots of rates show
const WHOLE_POOL = 512; // blocks of a pool that is shown block by block
const MOST_CELLS = 2048; // beyond, a cell stands for several blocks
const FEWEST_CELLS = 24;

export const memories = new Map(); // rank: Memory
export const selected = { rank: 0, key: null }; // the engine that is shown, and the request whose blocks stand out

/** What is remembered of an engine: its latest snapshot, and what came before it. The latest is last. */
export class Memory {
  engine = null;
  steps = [];
  finished = []; // each with a number of its own, `serial`
  rates = []; // {time, counters, generated, prompt, hits} for SPAN seconds
  flashes = []; // {block, way, begun}
  cells = new Cells();
  serial = 0;

  /** Whether a snapshot is from the same run of the engine. */
  goesOn(engine) {
    return engine.counters.generation_tokens >= this.engine.counters.generation_tokens;
  }

  /** Whether there is anything to see but the pool. */
  get hasRun() {
    return this.steps.length + this.finished.length + this.engine.requests.length > 0;
  }

  take(time, engine) {
    this.engine = engine;
    this.steps = [...this.steps, ...engine.steps].slice(-MOST_STEPS);
    const finished = engine.finished.map((end) => ({ ...end, serial: this.serial++ }));
    this.finished = [...this.finished, ...finished].slice(-MOST_FINISHED);
    for (const way of ["out", "in"]) {
      const begun = performance.now();
      this.flashes.push(...engine.moves[`blocks_${way}`].map((block) => ({ block, way, begun })));
    }
    this.cells.take(engine);
    this.sample(time, engine.counters);
  }

  /** Rates are over the last second. */
  sample(time, counters) {
    const before = this.rates.findLast((rate) => rate.time <= time - 1) ?? this.rates[0] ?? { time, counters };
    const rate = (name) => (counters[name] - before.counters[name]) / (time - before.time || 1);
    const hits = counters.prefix_hit_tokens / (counters.prefix_query_tokens || 1);
    this.rates.push({ time, counters, generated: rate("generation_tokens"), prompt: rate("prompt_tokens"), hits });
    while (this.rates[0].time < time - SPAN) this.rates.shift();
  }
}

/**
 * Which blocks the map shows. A small pool is shown as it is. Of a large one, in which a few requests would be lost, a
 * block gets a cell when it is first in use, and keeps it until another one needs it: so there are about as many cells
 * as blocks were in use at once. Where those are very many, the whole pool is shown, several blocks to a cell.
 */
class Cells {
  list = []; // {block, key, last}: the request that had it last, and in which snapshot that was
  places = new Map(); // of blocks in `list`
  owners = new Int32Array(); // of all blocks
  each = 1; // blocks for which a cell stands
  snapshot = 0;
  room = FEWEST_CELLS;

  /** @param {Engine} engine */
  take({ blocks, num_blocks: count }) {
    this.snapshot++;
    if (this.owners.length !== count) this.owners = new Int32Array(count);
    let at = 0;
    for (const [owner, length] of blocks) this.owners.fill(owner, at, (at += length));
    const used = [];
    this.owners.forEach((owner, block) => isUsed(owner) && used.push(block));
    this.each = count > WHOLE_POOL && used.length > MOST_CELLS ? Math.ceil(count / MOST_CELLS) : 1;
    if (this.each > 1) return;
    if (count <= WHOLE_POOL) while (this.list.length < count) this.add(this.list.length);
    else this.give(used.filter((block) => !this.places.has(block)), used.length);
    for (const block of used) {
      const cell = this.list[this.places.get(block)];
      cell.last = this.snapshot;
      if (this.owners[block] > 0) cell.key = this.owners[block];
    }
  }

  /** Give cells to blocks that are newly in use, first those that are free, then those unused for longest. */
  give(blocks, used) {
    this.room = Math.max(this.room, 16 * Math.ceil((1.1 * used) / 16));
    const idle = () => [...this.list.keys()].filter((i) => !isUsed(this.owners[this.list[i].block]));
    let reused = null;
    for (const block of blocks) {
      if (this.list.length < this.room) {
        this.add(block);
        continue;
      }
      reused ??= idle().sort((a, b) => this.list[a].last - this.list[b].last);
      const i = reused.shift();
      this.places.delete(this.list[i].block);
      this.places.set(block, i);
      this.list[i] = { block, key: null, last: 0 };
    }
  }

  add(block) {
    this.places.set(block, this.list.length);
    this.list.push({ block, key: null, last: 0 });
  }

  /** The owner of each cell, the request that had it last, and 0 for those that nobody has had. */
  drawn() {
    if (this.each === 1) {
      const cells = this.list.map(({ block, key }) => ({ owner: this.owners[block], key }));
      const spare = this.owners.length > WHOLE_POOL ? this.room - cells.length : 0;
      return [...cells, ...Array(Math.max(0, spare)).fill({ owner: 0, key: null })];
    }
    const cells = [];
    for (let at = 0; at < this.owners.length; at += this.each) {
      const part = this.owners.subarray(at, at + this.each);
      const owner = part.find(isUsed) ?? part.find((each) => each === -1) ?? 0;
      cells.push({ owner, key: owner > 0 ? owner : null });
    }
    return cells;
  }

  /** The cell of a block, or null where it has none. */
  cellOf(block) {
    return this.each > 1 ? Math.floor(block / this.each) : this.places.get(block) ?? null;
  }
}

function isUsed(owner) {
  return owner > 0 || owner === -2;
}

/** Seconds until the first token of a request that the stream has told of; else null. */
export function firstTokenOf(requestId) {
  const ends = [...memories.values()].flatMap(({ finished }) => finished);
  return ends.find(({ id }) => id && requestId === `${id}-0`)?.ttft ?? null;
}
