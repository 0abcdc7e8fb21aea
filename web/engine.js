/** The engines at work: /live, an event stream of snapshots, of which one engine at a time is drawn. */

import { drawMap, tally } from "./map.js";
import { memories, Memory, selected } from "./memory.js";
import { readInks, soon } from "./paint.js";
import { drawLatency, drawRates, drawSteps } from "./plots.js";
import { fillFinished, fillRequests } from "./rows.js";
import { ask, eventsOf, KeyWanted } from "./server.js";
import { chosenModel } from "./settings.js";
import { byId, duration, element, put, sentence, sleep, whole } from "./small.js";

const FIRST_PAUSE = 0.5; // seconds before a lost stream is tried again; each pause is twice the one before, up to
const LONGEST_PAUSE = 15;
const SILENCE = 5; // seconds without an event, of which a second has five, after which a stream is lost

let following = null; // the AbortController of the stream, while the page is visible

/** Follow the stream until the page is hidden. A lost one is tried again, after longer and longer pauses. */
export async function follow() {
  following?.abort();
  const { signal } = (following = new AbortController());
  for (let pause = FIRST_PAUSE; !signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
    showStream("Connecting", false);
    const error = await readStream(signal, () => (pause = FIRST_PAUSE)).catch((error) => error);
    if (signal.aborted) return;
    const isOver = error instanceof KeyWanted;
    showStream(sentence(error.message) + (isOver ? "" : ` Next try in ${duration(pause)}.`), false);
    byId("reconnect").hidden = false;
    if (isOver) return;
    await sleep(pause, signal);
  }
}

/** Read one connection to its end, which is an error whatever the reason. */
async function readStream(signal, onEvent) {
  const silence = new AbortController();
  let timer = 0;
  try {
    const query = chosenModel() && `?${new URLSearchParams({ model: chosenModel() })}`;
    const response = await ask(`live${query}`, { signal: AbortSignal.any([signal, silence.signal]) });
    for await (const event of eventsOf(response)) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), 1000 * SILENCE);
      onEvent();
      takeLive(event);
    }
  } catch (error) {
    throw silence.signal.aborted ? new Error("the server is silent") : error;
  } finally {
    clearTimeout(timer);
  }
  throw new Error("the connection was lost");
}

function showStream(words, isLive) {
  put(byId("stream"), words);
  byId("stream").classList.toggle("live", isLive);
  byId("live").classList.toggle("stale", !isLive);
  byId("reconnect").hidden = true;
}

function takeLive({ time, engines, trouble }) {
  showStream(trouble ? sentence(trouble) : "Live", !trouble);
  for (const engine of engines) {
    if (!memories.get(engine.rank)?.goesOn(engine)) memories.set(engine.rank, new Memory());
    memories.get(engine.rank).take(time, engine);
  }
  if (engines.length) showTabs(engines.map(({ rank }) => rank));
  soon(draw);
}

/** A tab for each engine, where there are several. */
function showTabs(ranks) {
  if (!ranks.includes(selected.rank)) selected.rank = ranks[0];
  const tabs = byId("engines");
  if (tabs.dataset.ranks === String(ranks)) return;
  tabs.dataset.ranks = ranks;
  tabs.hidden = ranks.length < 2;
  tabs.replaceChildren(tabs.firstElementChild, ...ranks.map((rank) => {
    const choose = () => {
      selected.rank = rank;
      soon(draw);
    };
    const input = element("input", { type: "radio", name: "engine", checked: rank === selected.rank, onchange: choose });
    return element("label", {}, input, `Engine ${rank}`);
  }));
}

byId("reconnect").onclick = follow;
byId("models").addEventListener("change", () => {
  memories.clear(); // another model may have other engines
  follow();
});
document.onvisibilitychange = () => (document.hidden ? following?.abort() : follow());

// --- drawing ---------------------------------------------------------------------------------------------------------

function draw(memory, now) {
  readInks();
  byId("live").classList.toggle("fresh", !memory.hasRun);
  showFigures(memory);
  drawMap(memory, now);
  fillRequests(memory.engine);
  fillFinished(memory.finished);
  drawSteps(memory.steps);
  drawLatency(memory.finished);
  drawRates(memory.rates);
}

function showFigures({ engine, rates }) {
  const { free, cached } = tally(engine);
  const { generated, hits } = rates.at(-1);
  for (const state of ["running", "waiting", "swapped"]) put(byId(state), whole.format(engine.counts[state]));
  const used = engine.num_blocks && 1 - (free + cached) / engine.num_blocks; // encoders have no blocks
  put(byId("used"), used > 0 && used < 0.01 ? "< 1 %" : `${whole.format(100 * used)} %`);
  put(byId("rate"), whole.format(generated));
  put(byId("hits"), `${whole.format(100 * hits)} %`);
  const { draft_tokens: drafts, accepted_tokens: taken } = engine.counters;
  byId("drafts").parentElement.hidden = !drafts;
  put(byId("drafts"), `${whole.format((100 * taken) / (drafts || 1))} %`);
}

matchMedia("(prefers-color-scheme: dark)").onchange = () => soon(draw);
new ResizeObserver(() => soon(draw)).observe(byId("live"));
