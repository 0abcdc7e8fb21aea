/**
 * The page at `/`: a chat on the left, and on the right the engine at work.
 *
 * The chat is /v1/chat/completions. The engine is /live, an event stream of snapshots, and /explain/<id>, where the time
 * of a request went. Paths are relative, so that the page works under `--root-path`. What comes from the server is put
 * in as text, never as markup.
 *
 * @typedef {{state: string, seconds: number, waited_for?: Object<string, number>, cached_tokens?: number,
 *   chunks?: number[], further_chunks?: number, recomputed_tokens?: number, started_over?: boolean,
 *   preempted?: {for: string, by: string, tokens: number}, served_instead?: {client: number, sequences: number},
 *   prefix_cache?: string}} Stay   one phase of an answer, as /explain tells it
 * @typedef {{token: string, logprob: number, bytes: number[], top_logprobs: Token[]}} Token   of `logprobs.content`
 * @typedef {{rank: number, num_blocks: number, blocks: [number, number][], requests: Object[], steps: Object[],
 *   finished: Object[], counts: Object<string, number>, counters: Object<string, number>, moves: Object}} Engine
 *   one engine in an event of /live; `blocks` are runs of [owner, length], and owners are in OWNERS or a request's key
 */

const ALTERNATIVES = 5; // for each token
const FIRST_PAUSE = 0.5; // seconds before the stream is tried again; it doubles up to
const LONGEST_PAUSE = 15;
const SILENCE = 5; // seconds without an event, five of which come in one, after which the stream counts as lost
const MOST_STEPS = 120;
const MOST_FINISHED = 60;
const SPAN = 60; // seconds that the plots of rates show
const FLASH = 900; // milliseconds for which a block that moves is seen to
const OWNERS = { 0: "free", "-1": "cached", "-2": "shared" };
const WAITS = {
  blocks: "free blocks", slots: "a free slot", tokens: "room in a step’s tokens", step: "the step under way to end",
  delay: "the scheduler’s delay", order: "others that had to run first", trial: "requests on trial, which run alone",
};
const STATES = { running: "running", swapped: "swapped out", waiting: "waiting", held: "held" };

// --- small things ----------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function button(text, act) {
  return element("button", { type: "button", className: "link", textContent: text, onclick: act });
}

function plural(count, one, many = `${one}s`) {
  return `${whole.format(count)} ${count === 1 ? one : many}`;
}

function duration(seconds) {
  if (seconds < 0.0995) return `${(1000 * seconds).toPrecision(2).replace(/\.0$/, "")} ms`;
  if (seconds < 99.5) return `${seconds < 9.95 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

function percent(share) {
  if (share > 0 && share < 0.0001) return "< 0.01 %";
  return `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
}

/** `chatcmpl-1f2e3d4c` of a longer id; its head tells requests apart well enough to the eye. */
function shortened(id) {
  return id.replace(/^([^-]*-[0-9a-f]{8})[0-9a-f]+/, "$1");
}

function sleep(seconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => resolve(clearTimeout(timer)), { once: true });
  });
}

// --- the server ------------------------------------------------------------------------------------------------------

let keyQuestion = null; // the promise of the dialog that is open, if it is

/** A reply of the server's that is no error; asks for the API key where the server wants one. */
async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers }).catch(lost);
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await errorOf(response));
    if (sessionStorage.getItem("key") === key) await askForKey(key !== null); // else it has just been given
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server answered ${response.status} ${response.statusText}`;
}

/** The browser's own words for a failed connection say little. */
function lost(error) {
  throw error.name === "AbortError" ? error : new Error("the server cannot be reached");
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

function askForKey(refused) {
  keyQuestion ??= new Promise((resolve, reject) => {
    const dialog = byId("key-dialog");
    byId("key-trouble").hidden = !refused;
    byId("key").value = dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      keyQuestion = null;
      if (dialog.returnValue !== "use") return reject(new Error("the server wants an API key"));
      sessionStorage.setItem("key", byId("key").value);
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return keyQuestion;
}

/** The events of a stream, parsed. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

// --- chat ------------------------------------------------------------------------------------------------------------

const chat = []; // {role, content, item}: what has been said, and where it stands on the page
let answering = null; // the AbortController of the answer that is being written

function say(role, content) {
  const text = element("div", { className: "text", textContent: content });
  const actions = element("div", { className: "actions" });
  const speaker = element("span", { className: "hidden", textContent: role === "user" ? "You:" : "The model:" });
  const item = element("li", { className: `message ${role}` }, speaker, text, actions);
  const turn = { role, content, item, text, actions };
  chat.push(turn);
  byId("messages").append(item);
  byId("welcome").hidden = true;
  return turn;
}

/** Take back a turn and all that came after it. */
function takeBack(turn) {
  for (const { item } of chat.splice(chat.indexOf(turn))) item.remove();
  byId("welcome").hidden = chat.length > 0;
  byId("prompt").focus();
}

function send(content) {
  const turn = say("user", content);
  turn.actions.append(button("Edit", () => {
    takeBack(turn);
    byId("prompt").value = content;
  }));
  return answer();
}

/** The request for the next answer. A field is sent as it was typed, if it is no number: the server says what is wrong. */
function requestBody() {
  const messages = chat.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
  const system = byId("system").value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const body = { messages, stream: true, stream_options: { include_usage: true } };
  for (const { name, value } of byId("fields").querySelectorAll("input")) {
    const number = Number(value);
    if (value.trim()) body[name] = Math.abs(number) <= Number.MAX_SAFE_INTEGER ? number : value;
  }
  if (byId("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  return JSON.stringify(body);
}

async function answer() {
  const body = requestBody();
  const turn = say("assistant", "");
  const stop = beginAnswer();
  const facts = { begun: performance.now(), tokens: body.includes('"logprobs":true') ? new Tokens(turn.text) : null };
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await ask("v1/chat/completions", { method: "POST", headers, body, signal: stop.signal });
    for await (const event of eventsOf(response)) take(event, turn, facts);
    if (!facts.reason) throw new Error("the answer broke off");
  } catch (error) {
    facts.trouble = stop.signal.aborted ? null : sentence(error.message);
    facts.reason = "stopped";
  }
  facts.tokens?.end();
  endAnswer(turn, facts);
}

function beginAnswer() {
  answering = new AbortController();
  showBusy(true);
  scrollDown(true);
  return answering;
}

function showBusy(busy) {
  byId("chat").classList.toggle("busy", busy);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

/** One event of an answer. */
function take(event, turn, facts) {
  if (event.error) throw new Error(event.error.message);
  facts.id = event.id;
  facts.usage = event.usage ?? facts.usage;
  for (const { delta, logprobs, finish_reason: reason } of event.choices) {
    const atBottom = isAtBottom();
    const content = delta.content ?? "";
    if (content) facts.first ??= performance.now();
    turn.content += content;
    if (!facts.tokens) turn.text.textContent = turn.content;
    // What comes with the end and without text ended the answer, and is no part of it.
    for (const token of logprobs?.content ?? []) facts.tokens.add(token, Boolean(reason && !content));
    facts.reason = reason ?? facts.reason;
    if (atBottom) scrollDown();
  }
}

function endAnswer(turn, facts) {
  const focused = document.activeElement === byId("stop");
  answering = null;
  showBusy(false);
  if (focused) byId("prompt").focus();
  if (!chat.includes(turn)) return; // a new chat has begun
  if (facts.trouble) turn.actions.append(element("p", { className: "trouble", textContent: facts.trouble }));
  else turn.actions.append(element("span", { className: "soft", textContent: summaryOf(facts) }));
  if (facts.id) turn.actions.append(button("Explain", () => explain(facts.id)));
  turn.actions.append(button(facts.trouble ? "Try again" : "Regenerate", () => {
    takeBack(turn);
    answer();
  }));
  byId("announcer").textContent = facts.trouble ?? `The model: ${turn.content}`;
  scrollDown(isAtBottom());
}

function summaryOf({ usage, begun, first, reason }) {
  const parts = [];
  if (usage) parts.push(plural(usage.completion_tokens, "token"));
  if (first) parts.push(`first after ${duration((first - begun) / 1000)}`);
  if (reason === "stopped") parts.push("stopped");
  if (reason === "length") parts.push("cut at the longest length");
  return parts.join(" · ");
}

function isAtBottom() {
  const { scrollHeight, scrollTop, clientHeight } = byId("conversation");
  return scrollHeight - scrollTop - clientHeight < 40;
}

function scrollDown(wanted = true) {
  if (wanted) byId("conversation").scrollTop = byId("conversation").scrollHeight;
}

function startChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const content = byId("prompt").value.trim();
    if (!content || answering) return;
    byId("prompt").value = "";
    send(content);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  byId("stop").addEventListener("click", () => answering?.abort());
  byId("new-chat").addEventListener("click", () => {
    answering?.abort();
    if (chat.length) takeBack(chat[0]);
  });
  for (const example of document.querySelectorAll(".chip")) {
    example.addEventListener("click", () => answering || send(example.textContent));
  }
}

// --- tokens and what else they might have been -----------------------------------------------------------------------

/** The tokens of an answer as spans. Bytes of a character that tokens share wait until it is whole. */
class Tokens {
  constructor(host) {
    this.host = host;
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.pending = [];
    host.setAttribute("role", "group");
    host.setAttribute("aria-label", "Answer, token by token: the arrow keys go through them");
    host.addEventListener("keydown", (event) => this.move(event));
  }

  /** @param {Token} token  @param {boolean} ended  whether it ended the answer, and is no part of it */
  add(token, ended) {
    this.pending.push(token);
    const text = this.decoder.decode(new Uint8Array(token.bytes), { stream: true });
    if (text) this.place(text, ended);
  }

  end() {
    const text = this.decoder.decode();
    if (text) this.place(text, false);
  }

  place(text, ended) {
    const span = element("span", { className: ended ? "token ended" : "token", textContent: text, tabIndex: -1 });
    span.tokens = this.pending;
    span.style.setProperty("--doubted", 1 - Math.min(...this.pending.map(({ logprob }) => Math.exp(logprob))));
    if (!this.host.firstChild) span.tabIndex = 0;
    this.host.append(span);
    this.pending = [];
  }

  /** One token of the answer is in the tab order, and the arrows move to others. */
  move(event) {
    const at = event.target;
    const next = {
      ArrowRight: at.nextSibling, ArrowLeft: at.previousSibling, Home: this.host.firstChild, End: this.host.lastChild,
    }[event.key];
    if (!next) return;
    event.preventDefault();
    at.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

/** White space is seen, and what is no whole text, too. */
function visible(text) {
  return text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "(nothing)";
}

function choicesOf(token) {
  const others = token.top_logprobs.some((other) => other.token === token.token) ? [] : [token];
  return [...others, ...token.top_logprobs].map((choice) => {
    const share = Math.exp(choice.logprob);
    const line = element("div", { className: choice.token === token.token ? "choice chosen" : "choice" },
      element("span", { textContent: visible(choice.token) }), element("span", { textContent: percent(share) }));
    line.style.setProperty("--share", share);
    return line;
  });
}

function showTip(span) {
  const tip = byId("tip");
  tip.replaceChildren(...span.tokens.map((token) => element("div", { className: "choices" }, ...choicesOf(token))));
  tip.hidden = false;
  span.setAttribute("aria-describedby", "tip");
  const at = span.getClientRects()[0];
  const { width, height } = tip.getBoundingClientRect();
  const above = at.bottom + height + 12 > innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  tip.style.top = `${above ? at.top - height - 6 : at.bottom + 6}px`;
}

function startTips() {
  const hide = () => (byId("tip").hidden = true);
  for (const kind of ["pointerover", "focusin"]) {
    byId("messages").addEventListener(kind, ({ target }) => (target.tokens ? showTip(target) : hide()));
  }
  for (const kind of ["pointerleave", "focusout"]) byId("messages").addEventListener(kind, hide);
  byId("conversation").addEventListener("scroll", hide);
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

// --- the stream of the engines ---------------------------------------------------------------------------------------

let following = null; // the AbortController of the stream, while the page is visible
let shown = 0; // the rank of the engine that is shown
let highlighted = null; // the key of the request whose blocks stand out
const memories = new Map(); // rank: Memory

/** Follow the stream until the page is hidden. What is lost is tried again, after longer and longer pauses. */
async function follow() {
  following?.abort();
  const { signal } = (following = new AbortController());
  for (let pause = FIRST_PAUSE; !signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
    showStream("Connecting", false);
    const words = await readStream(signal, () => (pause = FIRST_PAUSE / 2));
    if (signal.aborted) return;
    showStream(`${words} Next try in ${duration(pause)}`, false);
    await sleep(pause, signal);
  }
}

/** Read one connection to its end; returns in words why it ended. */
async function readStream(signal, onEvent) {
  const silence = new AbortController();
  let timer = 0;
  try {
    const response = await ask("live", { signal: AbortSignal.any([signal, silence.signal]) });
    for await (const event of eventsOf(response)) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), 1000 * SILENCE);
      onEvent();
      takeLive(event);
    }
    return "The connection was lost.";
  } catch (error) {
    return silence.signal.aborted ? "The server is silent." : sentence(error.message);
  } finally {
    clearTimeout(timer);
  }
}

function showStream(words, isLive) {
  if (byId("stream").textContent !== words) byId("stream").textContent = words;
  byId("stream").classList.toggle("live", isLive);
  byId("live").classList.toggle("stale", !isLive);
  byId("reconnect").hidden = isLive || words === "Connecting";
}

function takeLive({ time, engines, trouble }) {
  showStream(trouble ? sentence(trouble) : "Live", !trouble);
  byId("reconnect").hidden = true; // it is connected, even to an engine in trouble
  for (const engine of engines) {
    if (!(memories.get(engine.rank)?.take(time, engine))) memories.set(engine.rank, new Memory(time, engine));
  }
  if (engines.length) showTabs(engines.map(({ rank }) => rank));
  redraw();
}

/** What the page remembers of an engine. */
class Memory {
  constructor(time, engine) {
    this.steps = []; // the latest is last
    this.finished = []; // the latest is last, and each has a `serial` number
    this.rates = []; // {time, generated, prompt, hits} for SPAN seconds
    this.samples = []; // {time, counters} of the last second
    this.flashes = []; // {block, way, begun}
    this.serial = 0;
    this.take(time, engine);
  }

  /** Take an event in; false if it is from an engine that has begun anew. */
  take(time, engine) {
    const before = this.engine?.counters;
    if (before && engine.counters.generation_tokens < before.generation_tokens) return false;
    this.engine = engine;
    this.steps = [...this.steps, ...engine.steps].slice(-MOST_STEPS);
    for (const end of engine.finished) this.finished.push({ ...end, serial: this.serial++ });
    this.finished = this.finished.slice(-MOST_FINISHED);
    this.sample(time, engine.counters);
    const begun = performance.now();
    for (const way of ["out", "in"]) {
      this.flashes.push(...engine.moves[`blocks_${way}`].map((block) => ({ block, way, begun })));
    }
    return true;
  }

  sample(time, counters) {
    this.samples.push({ time, counters });
    while (this.samples.length > 2 && this.samples[1].time <= time - 1) this.samples.shift();
    const first = this.samples[0];
    const rate = (name) => (counters[name] - first.counters[name]) / Math.max(time - first.time, 0.1);
    const hits = counters.prefix_query_tokens ? counters.prefix_hit_tokens / counters.prefix_query_tokens : 0;
    this.rates.push({ time, generated: rate("generation_tokens"), prompt: rate("prompt_tokens"), hits });
    while (this.rates[0].time < time - SPAN) this.rates.shift();
  }
}

/** A tab for each engine, where there are several. */
function showTabs(ranks) {
  const tabs = byId("engines");
  const has = [...tabs.querySelectorAll("input")].map(({ value }) => Number(value));
  if (!ranks.includes(shown)) shown = ranks[0];
  if (has.join() === ranks.join()) return;
  tabs.querySelectorAll("label").forEach((label) => label.remove());
  for (const rank of ranks) {
    const input = element("input", { type: "radio", name: "engine", value: rank, checked: rank === shown });
    input.addEventListener("change", () => {
      shown = rank;
      redraw();
    });
    tabs.append(element("label", {}, input, `Engine ${rank}`));
  }
  tabs.hidden = ranks.length < 2;
}

// --- drawing ---------------------------------------------------------------------------------------------------------

let frame = 0; // that is asked for

function redraw() {
  frame ||= requestAnimationFrame((now) => {
    frame = 0;
    const memory = memories.get(shown);
    if (memory) draw(memory, now);
  });
}

function draw(memory, now) {
  drawFigures(memory);
  drawMap(memory, now);
  fillRequests(memory.engine);
  fillFinished(memory.finished);
  drawSteps(memory.steps);
  drawLatency(memory.finished);
  drawRates(memory.rates);
  if (memory.flashes.length) redraw();
}

/** The colour of a swatch of the legends: what is drawn on a canvas has the colours that the legends show. */
function inkOf(name) {
  return getComputedStyle(document.querySelector(`[data-ink="${name}"]`)).backgroundColor;
}

function hueOf(key) {
  return (key * 137.508) % 360; // the golden angle: keys that are near have hues that are not
}

/** A canvas made ready for a drawing in CSS pixels. */
function clean(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const [across, down] = [width, height].map((side) => Math.round(side * devicePixelRatio));
  if (canvas.width !== across) canvas.width = across;
  if (canvas.height !== down) canvas.height = down;
  const pen = canvas.getContext("2d");
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

function drawFigures({ engine, rates }) {
  const free = tally(engine).free + tally(engine).cached;
  const { generated, hits } = rates.at(-1);
  for (const state of ["running", "waiting", "swapped"]) setText(state, whole.format(engine.counts[state]));
  setText("used", `${whole.format(100 * (1 - free / engine.num_blocks))} %`);
  setText("rate", whole.format(generated));
  setText("hits", engine.counters.prefix_query_tokens ? `${whole.format(100 * hits)} %` : "–");
}

/** How many blocks are free, cached, shared, or of one request. @param {Engine} engine */
function tally(engine) {
  const counts = { free: 0, cached: 0, shared: 0, owned: 0 };
  for (const [owner, length] of engine.blocks) counts[OWNERS[owner] ?? "owned"] += length;
  return counts;
}

function drawMap({ engine, flashes }, now) {
  const canvas = byId("blocks");
  const side = cellSide(engine.num_blocks, canvas.clientWidth);
  const columns = Math.floor(canvas.clientWidth / side);
  canvas.style.height = `${Math.ceil(engine.num_blocks / columns) * side}px`;
  const { pen, width, height } = clean(canvas);
  let at = 0;
  for (const [owner, length] of engine.blocks) {
    pen.fillStyle = OWNERS[owner] ? inkOf(OWNERS[owner]) : `oklch(0.64 0.12 ${hueOf(owner)})`;
    pen.globalAlpha = highlighted === null || highlighted === owner ? 1 : 0.25;
    for (const end = at + length; at < end; ) {
      const count = Math.min(end - at, columns - (at % columns)); // up to the end of its line
      const [x, y] = [(at % columns) * side, Math.floor(at / columns) * side];
      pen.fillRect(x, y, count * side, side);
      if (owner === -2) hatch(pen, x, y, count * side, side);
      at += count;
    }
  }
  pen.globalAlpha = 1;
  const gap = side >= 12 ? 2 : side >= 4 ? 1 : 0;
  for (let x = side; x <= width; x += side) pen.clearRect(x - gap, 0, gap, height);
  for (let y = side; y <= height; y += side) pen.clearRect(0, y - gap, width, gap);
  drawFlashes(pen, flashes, side - gap, side, columns, now);
  setText("blocks-text", mapWords(engine));
}

/** The largest side, in CSS pixels, at which so many cells fit into a quarter of a square of this width. */
function cellSide(count, width) {
  const height = Math.max(width / 4, 150);
  let side = 26;
  while (side > 0.5 && Math.floor(width / side) * Math.floor(height / side) < count) side -= side > 4 ? 1 : 0.5;
  return side;
}

function hatch(pen, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.beginPath();
  for (let i = -height; i < width; i += 4) {
    pen.moveTo(x + i, y + height);
    pen.lineTo(x + i + height, y);
  }
  pen.strokeStyle = getComputedStyle(byId("blocks").parentElement).backgroundColor;
  pen.stroke();
  pen.restore();
}

/** Blocks that leave for the host rise and fade; those that come back sink into their place. */
function drawFlashes(pen, flashes, size, side, columns, now) {
  while (flashes.length && now - flashes[0].begun > FLASH) flashes.shift();
  pen.fillStyle = inkOf("moved");
  for (const { block, way, begun } of flashes) {
    const part = Math.max(0, (now - begun) / FLASH);
    const lift = still.matches ? 0 : Math.max(side, 8) * (way === "out" ? part : 1 - part);
    pen.globalAlpha = still.matches ? 1 : 1 - part;
    pen.fillRect((block % columns) * side, Math.floor(block / columns) * side - lift, Math.max(size, 3), Math.max(size, 3));
  }
  pen.globalAlpha = 1;
}

function mapWords(engine) {
  const { free, cached, shared, owned } = tally(engine);
  const { out, in: back, copies } = engine.moves;
  const words = [
    `${whole.format(owned + shared)} of ${plural(engine.num_blocks, "block")} of ${engine.block_size} tokens in use`,
    `${whole.format(shared)} shared`, `${whole.format(cached)} cached`, `${whole.format(free)} free`,
  ];
  if (engine.num_host_blocks) words.push(`${whole.format(engine.num_host_blocks)} more on the host`);
  if (out + back + copies) words.push(`now moving: ${out} out, ${back} in, ${plural(copies, "copy", "copies")}`);
  return words.join(" · ");
}

/** Bars from the right, the latest last. @param {{parts: number[], mark?: boolean}[]} bars */
function drawBars(id, bars, most, inks, markInk) {
  const { pen, width, height } = clean(byId(id));
  const step = width / most;
  const room = height - 10; // above is room for marks
  const top = Math.max(...bars.map(({ parts }) => parts.reduce((sum, part) => sum + part, 0)), Number.MIN_VALUE);
  const colours = inks.map(inkOf);
  drawFloor(pen, width, height);
  bars.forEach(({ parts, mark }, i) => {
    const x = width - (bars.length - i) * step;
    let y = height;
    parts.forEach((part, which) => {
      const tall = part && Math.max(1.5, (part / top) * room);
      pen.fillStyle = colours[which];
      pen.fillRect(x, (y -= tall), Math.max(1, step - (step > 3 ? 1 : 0)), tall);
    });
    if (mark) drawMark(pen, x + step / 2, y - 2, inkOf(markInk));
  });
}

function drawMark(pen, x, y, ink) {
  pen.fillStyle = ink;
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(x - 4, y - 6);
  pen.lineTo(x + 4, y - 6);
  pen.fill();
}

function drawFloor(pen, width, height) {
  pen.fillStyle = inkOf("free");
  pen.fillRect(0, height - 1, width, 1);
}

function drawSteps(steps) {
  const bars = steps.map(({ prefill, decode, preempted }) => ({ parts: [decode, prefill], mark: preempted > 0 }));
  drawBars("steps", bars, MOST_STEPS, ["decode", "prefill"], "preempted");
  const last = steps.at(-1);
  if (!last) return setText("steps-text", "No step has run yet.");
  const lost = last.preempted ? `, ${last.preempted} preempted` : "";
  const rows = `${plural(last.decode, "row")} decoding, ${plural(last.prefill, "prompt token")}${lost}`;
  setText("steps-text", `Step ${whole.format(last.step)}: ${rows}, ${duration(last.ms / 1000)}`);
}

function drawLatency(finished) {
  const timed = finished.filter(({ ttft, e2e }) => ttft !== null && e2e !== null);
  const bars = timed.map(({ ttft, e2e }) => ({ parts: [ttft, e2e - ttft] }));
  drawBars("latency", bars, MOST_FINISHED, ["first", "rest"]);
  if (!bars.length) return setText("latency-text", "No request has finished yet.");
  const middle = (name) => timed.map((end) => end[name]).sort((a, b) => a - b)[Math.floor(timed.length / 2)];
  const words = `first token ${duration(middle("ttft"))}, end ${duration(middle("e2e"))}`;
  setText("latency-text", `Median of the last ${timed.length}: ${words}`);
}

function drawRates(rates) {
  const { generated, prompt, hits } = rates.at(-1);
  const most = Math.max(...rates.map((rate) => rate.generated));
  drawLine("throughput", rates, "generated", most);
  drawLine("prefix", rates, "hits", 1);
  setText("throughput-text", `${whole.format(generated)} generated and ${whole.format(prompt)} prompt tokens a second; `
    + `at most ${whole.format(most)} in the last minute`);
  setText("prefix-text", `${percent(hits)} of prompt tokens were found in the cache since the start`);
}

function drawLine(id, rates, name, top) {
  const { pen, width, height } = clean(byId(id));
  const end = rates.at(-1).time;
  drawFloor(pen, width, height);
  if (top <= 0 || rates.length < 2) return;
  const places = rates.map((rate) => [
    width * (1 - (end - rate.time) / SPAN), height - 1 - (rate[name] / top) * (height - 6),
  ]);
  pen.beginPath();
  for (const [x, y] of places) pen.lineTo(x, y);
  pen.strokeStyle = pen.fillStyle = inkOf("decode");
  pen.lineWidth = 1.5;
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(places[0][0], height);
  pen.globalAlpha = 0.15;
  pen.fill();
  pen.globalAlpha = 1;
}

// --- lists of requests -----------------------------------------------------------------------------------------------

/** Make the rows of a list those of `items`. A row stays the same element, so that it keeps the focus. */
function fill(list, items, keyOf, update) {
  const wanted = new Map(items.map((item) => [String(keyOf(item)), item]));
  for (const row of [...list.children]) if (!wanted.has(row.dataset.key)) row.remove();
  const rows = new Map([...list.children].map((row) => [row.dataset.key, row]));
  let place = list.firstChild;
  for (const [key, item] of wanted) {
    const row = rows.get(key) ?? newRow(key);
    if (row === place) place = place.nextSibling;
    else list.insertBefore(row, place);
    update(row.firstChild, item);
  }
}

function newRow(key) {
  const parts = ["ink", "name", "facts"].map((className) => element("span", { className }));
  const row = element("li", {}, element("button", { type: "button", className: "row" }, ...parts));
  row.dataset.key = key;
  return row;
}

function updateRow(row, item, facts) {
  const [, name, told] = row.children;
  row.item = item;
  row.disabled = item.id === null;
  row.title = item.id ?? "Only its own API key may know more of it";
  name.textContent = item.id === null ? "another key’s request" : shortened(item.id);
  told.textContent = facts;
}

function fillRequests({ requests, counts }) {
  const samples = new Map(); // of each request, by its key
  const keyOf = ({ key }) => {
    samples.set(key, (samples.get(key) ?? 0) + 1);
    return `${key}.${samples.get(key)}`;
  };
  fill(byId("requests"), requests, keyOf, (row, request) => {
    const { key, state, prompt, computed, output, preemptions } = request;
    const again = preemptions ? ` · preempted ${preemptions}×` : "";
    const read = computed < prompt ? `${computed} of ${prompt} read` : `${output} out`;
    updateRow(row, request, `${read}${again} · ${STATES[state] ?? state}`);
    row.style.setProperty("--hue", hueOf(key));
  });
  const all = counts.running + counts.waiting + counts.swapped;
  const rest = all > requests.length && requests.length ? `, the first ${requests.length} of them here` : "";
  setText("requests-text", all ? `${counts.running} running, ${counts.swapped} swapped out, ${counts.waiting} waiting${rest}`
    : "Nothing runs.");
}

function fillFinished(finished) {
  fill(byId("finished"), finished.toReversed(), ({ serial }) => serial, (row, end) => {
    const again = end.preemptions ? ` · preempted ${end.preemptions}×` : "";
    const time = end.e2e === null ? "" : ` · ${duration(end.e2e)}`;
    updateRow(row, end, `${end.prompt} in, ${end.output} out${again}${time}`);
  });
}

function startLists() {
  for (const id of ["requests", "finished"]) {
    const list = byId(id);
    list.addEventListener("click", ({ target }) => {
      const item = target.closest(".row")?.item;
      if (item) explain(item.id, item.ttft);
    });
    for (const kind of ["pointerover", "focusin"]) {
      list.addEventListener(kind, ({ target }) => (highlighted = target.closest(".row")?.item?.key ?? null));
    }
    for (const kind of ["pointerleave", "focusout"]) list.addEventListener(kind, () => (highlighted = null));
  }
}

// --- where the time of a request went --------------------------------------------------------------------------------

/** Show the story of a request, anew each second while it runs. `first`: seconds to its first token, where known. */
async function explain(id, first = null) {
  const dialog = byId("story");
  const closed = new AbortController();
  byId("story-id").textContent = id;
  byId("story-body").replaceChildren(element("p", { className: "soft", textContent: "Asking the engine" }));
  dialog.addEventListener("close", () => closed.abort(), { once: true });
  dialog.showModal();
  try {
    for (let running = true; running && !closed.signal.aborted; ) {
      const response = await ask(`explain/${encodeURIComponent(id)}`, { signal: closed.signal });
      const { prompts } = await response.json();
      byId("story-body").replaceChildren(...prompts.flatMap((prompt) => storyOf(prompt, first)));
      running = prompts.some(({ finished }) => !finished);
      if (running) await sleep(1, closed.signal);
    }
  } catch (error) {
    if (closed.signal.aborted) return;
    byId("story-body").replaceChildren(element("p", { className: "trouble", textContent: sentence(error.message) }));
  }
}

function storyOf(prompt, first) {
  return prompt.answers.map((answer) => {
    const { state, finish_reason: reason, output_tokens: output } = answer;
    const phases = phasesOf(answer.stays, prompt.answers.length === 1 ? first : null);
    const facts = [
      `${duration(prompt.seconds)} ${prompt.finished ? "in all" : "so far"}`, plural(prompt.prompt_tokens, "prompt token"),
      plural(output, "token") + " out", state === "finished" ? `ended by ${reason}` : STATES[state] ?? state,
    ];
    if (answer.ahead !== undefined) facts.push(`${answer.ahead} ahead of it`);
    return element("section", { className: "told" },
      element("p", { className: "soft", textContent: facts.join(" · ") }),
      element("div", { className: "track" }, ...phases.map((phase) => phaseMark("", phase))),
      element("ol", { className: "phases" }, ...phases.map((phase) => element("li", {}, phaseMark("ink ", phase),
        element("span", { textContent: phase.words }), element("span", { className: "soft", textContent: duration(phase.seconds) })))));
  });
}

function phaseMark(kind, { state, seconds }) {
  const mark = element("span", { className: `${kind}phase-${state}` });
  mark.style.setProperty("--milliseconds", 1000 * seconds);
  return mark;
}

/** The phases of an answer, with words. Its first run is cut at the first token, where that came in it. */
function phasesOf(stays, first) {
  const phases = [];
  let begun = 0;
  for (const stay of stays) {
    const { state, seconds } = stay;
    if (state === "waiting" || state === "swapped") phases.push(...waitsOf(stay));
    else if (state !== "running") phases.push({ state, seconds, words: "held until another answer has computed the prompt" });
    else if (stay.chunks && first > begun && first < begun + seconds) {
      phases.push({ state: "prefill", seconds: first - begun, words: prefillWords(stay).join(", ") });
      phases.push({ state, seconds: begun + seconds - first, words: ["decoded", ...endWords(stay)].join(", ") });
    } else phases.push({ state, seconds, words: runWords(stay).join(", ") });
    begun += seconds;
  }
  return phases.map((phase) => ({ ...phase, words: sentence(phase.words) }));
}

function waitsOf({ state, seconds, waited_for: waited = {}, served_instead: rival, started_over: again }) {
  const reasons = Object.entries(waited);
  const where = state === "swapped" ? "swapped out to the host, waited" : "waited";
  const more = (rival ? `, while client ${rival.client} ran ${plural(rival.sequences, "sequence")}` : "")
    + (again ? ", after the worker had to start over" : "");
  if (!reasons.length) return [{ state, seconds, words: where + more }];
  return reasons.map(([reason, part]) => ({ state, seconds: part, words: `${where} for ${WAITS[reason] ?? reason}${more}` }));
}

function runWords(stay) {
  const read = stay.chunks ? prefillWords(stay) : [];
  return [...read, read.length ? "then decoded" : "decoded", ...endWords(stay)];
}

function prefillWords({ chunks, further_chunks: further = 0, cached_tokens: cached, recomputed_tokens: again, prefix_cache: why }) {
  const sizes = chunks.length > 6 ? [...chunks.slice(0, 6), "…"] : chunks;
  const tokens = plural(chunks.reduce((sum, chunk) => sum + chunk, 0), "token");
  const words = [`computed ${tokens} in ${plural(chunks.length + further, "chunk")} (${sizes.join(", ")})`];
  if (cached) words.unshift(`found ${plural(cached, "token")} in the prefix cache`);
  if (why) words.push(`the prefix cache was ${why}`);
  if (again) words.push(`${plural(again, "token")} of them again`);
  return words;
}

function endWords({ preempted }) {
  if (!preempted) return [];
  const cause = shortened(preempted.for);
  return [`then was preempted by ${preempted.by} for ${cause}, with ${plural(preempted.tokens, "token")} computed`];
}

// --- the start -------------------------------------------------------------------------------------------------------

function startTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const show = () => {
    const kept = localStorage.getItem("theme");
    if (kept) root.dataset.theme = kept;
    byId("theme").textContent = (kept ?? (dark.matches ? "dark" : "light")) === "dark" ? "Light" : "Dark";
    redraw();
  };
  byId("theme").addEventListener("click", () => {
    localStorage.setItem("theme", byId("theme").textContent.toLowerCase());
    show();
  });
  dark.addEventListener("change", show);
  show();
}

async function showModel() {
  try {
    const { data } = await (await ask("v1/models")).json();
    setText("model", `${data[0].id}, ${whole.format(data[0].max_model_len)} tokens of context`);
    document.title = `${data[0].id} · Manta`;
  } catch (error) {
    setText("model", sentence(error.message));
  }
}

function startLive() {
  byId("reconnect").addEventListener("click", follow);
  byId("close-story").addEventListener("click", () => byId("story").close());
  document.addEventListener("visibilitychange", () => (document.hidden ? following?.abort() : follow()));
  new ResizeObserver(redraw).observe(byId("live"));
  if (!document.hidden) follow();
}

startTheme();
startChat();
startTips();
startLists();
showModel();
startLive();
