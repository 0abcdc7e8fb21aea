/**
 * The page at `/`: a chat on the left, and on the right the engine at work.
 *
 * The chat is /v1/chat/completions. The engine is /live, an event stream of snapshots, and /explain/<id>, which tells
 * where the time of a request went. Paths are relative, so that the page works under `--root-path`. What comes from the
 * server is put in as text, never as markup.
 *
 * @typedef {{token: string, logprob: number, bytes: number[], top_logprobs: Token[]}} Token   of `logprobs.content`
 * @typedef {{rank: number, num_blocks: number, blocks: [number, number][], requests: Object[], steps: Object[],
 *   finished: Object[], counts: Object<string, number>, counters: Object<string, number>, moves: Object}} Engine
 *   one engine in an event of /live; `blocks` are runs of [owner, length], and owners are in OWNERS or a request's key
 * @typedef {{state: string, seconds: number, waited_for?: Object<string, number>, chunks?: number[],
 *   preempted?: {for: string, by: string, tokens: number}}} Stay   one phase of an answer, as /explain tells it
 */

const ALTERNATIVES = 5; // for each token
const FIRST_PAUSE = 0.5; // seconds before a lost stream is tried again; each pause is twice the one before, up to
const LONGEST_PAUSE = 15;
const SILENCE = 5; // seconds without an event, of which a second has five, after which a stream is lost
const MOST_STEPS = 120;
const MOST_FINISHED = 60;
const SPAN = 60; // seconds that the plots of rates show
const FLASH = 900; // milliseconds for which a block is seen to move
const OWNERS = { 0: "free", "-1": "cached", "-2": "shared" };
const WAITS = {
  blocks: "free blocks", slots: "a free slot", tokens: "room in a step’s tokens", step: "the step under way to end",
  delay: "the scheduler’s delay", order: "others that had to run first", trial: "requests on trial, which run alone",
};

// --- small things ----------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function link(text, act) {
  return element("button", { type: "button", className: "link", textContent: text, onclick: act });
}

/** Change an element's text, if it is another one. */
function put(where, text) {
  if (where.textContent !== text) where.textContent = text;
}

function plural(count, one) {
  return `${whole.format(count)} ${one}${count === 1 ? "" : "s"}`;
}

function duration(seconds) {
  if (seconds < 0.0995) return `${(1000 * seconds).toPrecision(2).replace(/\.0$/, "")} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

function percent(share) {
  if (share > 0 && share < 0.0001) return "< 0.01 %";
  return `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** The first digits of an id like `chatcmpl-1f2e3d4c5b6a...`, which are enough to tell requests apart. */
function shortened(id) {
  return id.replace(/^[^-]*-([0-9a-f]{8}).*/, "$1");
}

function sleep(seconds, signal) {
  return new Promise((resolve) => {
    setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", resolve, { once: true });
  });
}

// --- the server ------------------------------------------------------------------------------------------------------

class KeyWanted extends Error {}

let keyQuestion = null; // the promise of the dialog that is open, if it is

/** A reply of the server's that is no error; asks for the API key where the server wants one. */
async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers }).catch(unreachable);
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await errorOf(response));
    if (sessionStorage.getItem("key") === key) await askForKey(key !== null); // else it has just been given
  }
}

/** The browser's own words for a connection that fails say little. */
function unreachable(error) {
  throw error.name === "AbortError" ? error : new Error("the server cannot be reached");
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status} ${response.statusText}`;
}

function askForKey(refused) {
  keyQuestion ??= new Promise((resolve, reject) => {
    const dialog = byId("key-dialog");
    byId("key-trouble").hidden = !refused;
    byId("key").value = dialog.returnValue = "";
    dialog.onclose = () => {
      keyQuestion = null;
      if (dialog.returnValue !== "use") return reject(new KeyWanted("the server wants an API key"));
      sessionStorage.setItem("key", byId("key").value);
      resolve();
    };
    dialog.showModal();
  });
  return keyQuestion;
}

/** The events of a stream, parsed. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read().catch(unreachable);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part !== "data: [DONE]") yield JSON.parse(part.replace("data: ", ""));
  }
}

async function showModel() {
  const { data: [{ id, max_model_len: longest }] } = await (await ask("v1/models")).json();
  put(byId("model"), `${id}, ${whole.format(longest)} tokens of context`);
  document.title = `${id} · Manta`;
}

// --- chat ------------------------------------------------------------------------------------------------------------

const chat = []; // {role, content, ...} for each turn, with its elements and what is known of it
let answering = null; // the AbortController of the answer that is being written

function say(role, content) {
  const text = element("div", { className: "text", textContent: content });
  const actions = element("div", { className: "actions" });
  const speaker = element("span", { className: "hidden", textContent: role === "user" ? "You:" : "The model:" });
  const item = element("li", { className: `message ${role}` }, speaker, text, actions);
  const turn = { role, content, item, text, actions, begun: performance.now() };
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
  turn.actions.append(link("Edit", () => {
    takeBack(turn);
    byId("prompt").value = content;
  }));
  answer();
}

/** The request for the next answer. What is no number is sent as it was typed, and the server says what is wrong. */
function requestBody() {
  const messages = chat.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
  const system = byId("system").value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  // What a model writes for itself stays in the text, where the tokens are shown as well.
  const body = { messages, stream: true, stream_options: { include_usage: true }, separate_reasoning: false };
  for (const { name, value } of byId("fields").querySelectorAll("input")) {
    if (value.trim()) body[name] = Math.abs(value) <= Number.MAX_SAFE_INTEGER ? Number(value) : value;
  }
  return byId("logprobs").checked ? { ...body, logprobs: true, top_logprobs: ALTERNATIVES } : body;
}

async function answer() {
  const body = requestBody();
  const turn = say("assistant", "");
  if (body.logprobs) turn.tokens = new Tokens(turn.text);
  const { signal } = (answering = new AbortController());
  showBusy(true);
  scrollDown();
  try {
    const headers = { "Content-Type": "application/json" };
    const request = { method: "POST", headers, body: JSON.stringify(body), signal };
    for await (const event of eventsOf(await ask("v1/chat/completions", request))) take(event, turn);
    if (!turn.reason) throw new Error("the answer broke off");
  } catch (error) {
    turn.reason = "stopped";
    turn.trouble = signal.aborted ? null : sentence(error.message);
  }
  turn.tokens?.end();
  answering = null;
  showBusy(false);
  if (chat.includes(turn)) conclude(turn); // else a new chat has begun
}

function showBusy(busy) {
  const focused = document.activeElement === byId("stop");
  byId("chat").classList.toggle("busy", busy);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  if (focused) byId("prompt").focus();
}

/** One event of an answer. */
function take(event, turn) {
  if (event.error) throw new Error(event.error.message);
  const atBottom = isAtBottom();
  turn.id = event.id;
  turn.usage = event.usage ?? turn.usage;
  for (const { delta, logprobs, finish_reason: reason } of event.choices) {
    turn.reason = reason ?? turn.reason;
    if (delta.content) {
      turn.first ??= performance.now();
      turn.content += delta.content;
      if (!turn.tokens) turn.text.append(delta.content);
    }
    // Tokens that come with the end and without text have ended the answer, and are no part of it.
    for (const token of logprobs?.content ?? []) turn.tokens.add(token, Boolean(reason && !delta.content));
  }
  if (atBottom) scrollDown();
}

/** Say below an answer what it took, or what went wrong, and what can be done now. */
function conclude(turn) {
  const atBottom = isAtBottom();
  const words = turn.trouble ?? summaryOf(turn);
  turn.actions.append(element("span", { className: turn.trouble ? "trouble" : "soft", textContent: words }));
  if (turn.id) turn.actions.append(link("Explain", () => explain(turn.id)));
  turn.actions.append(link(turn.trouble ? "Try again" : "Regenerate", () => {
    takeBack(turn);
    answer();
  }));
  byId("announcer").textContent = turn.trouble ?? `The model: ${turn.content}`;
  if (atBottom) scrollDown();
}

function summaryOf({ usage, begun, first, reason }) {
  const parts = usage ? [plural(usage.completion_tokens, "token")] : [];
  if (first) parts.push(`first after ${duration((first - begun) / 1000)}`);
  if (reason === "length") parts.push("cut at the longest length");
  else if (reason !== "stop") parts.push(reason);
  return parts.join(" · ");
}

function isAtBottom() {
  const { scrollHeight, scrollTop, clientHeight } = byId("conversation");
  return scrollHeight - scrollTop - clientHeight < 40;
}

function scrollDown() {
  byId("conversation").scrollTop = byId("conversation").scrollHeight;
}

byId("composer").onsubmit = (event) => {
  event.preventDefault();
  const content = byId("prompt").value.trim();
  if (!content || answering) return;
  byId("prompt").value = "";
  send(content);
};
byId("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
};
byId("stop").onclick = () => answering?.abort();
byId("new-chat").onclick = () => {
  answering?.abort();
  if (chat.length) takeBack(chat[0]);
};
for (const example of document.querySelectorAll(".chip")) {
  example.onclick = () => answering || send(example.textContent);
}

// --- tokens, and what else they might have been ----------------------------------------------------------------------

/** The tokens of an answer as spans. The bytes of a character that several tokens share wait until it is whole. */
class Tokens {
  constructor(host) {
    this.host = host;
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.waiting = [];
    host.role = "group";
    host.ariaLabel = "Answer, token by token: the arrow keys go through them";
    host.onkeydown = (event) => this.move(event);
  }

  /** @param {Token} token  @param {boolean} ended  whether it ended the answer, and is no part of it */
  add(token, ended) {
    this.waiting.push(token);
    this.place(this.decoder.decode(new Uint8Array(token.bytes), { stream: true }), ended);
  }

  end() {
    this.place(this.decoder.decode(), false);
  }

  place(text, ended) {
    if (!text) return;
    const span = element("span", { className: ended ? "token ended" : "token", textContent: text });
    span.tabIndex = this.host.firstChild ? -1 : 0;
    span.tokens = this.waiting;
    span.style.setProperty("--doubt", 1 - Math.min(...this.waiting.map(({ logprob }) => Math.exp(logprob))));
    this.host.append(span);
    this.waiting = [];
  }

  /** One token of the answer is in the tab order, and the arrow keys move to others. */
  move({ key, target }) {
    const { nextSibling: ArrowRight, previousSibling: ArrowLeft } = target;
    const next = { ArrowRight, ArrowLeft, Home: this.host.firstChild, End: this.host.lastChild }[key];
    if (!next) return;
    target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

/** The most likely tokens in one's place, and the chosen one even if it is none of them. @param {Token} token */
function choicesOf(token) {
  const isChosen = (choice) => choice.token === token.token;
  const choices = token.top_logprobs.some(isChosen) ? token.top_logprobs : [token, ...token.top_logprobs];
  const lines = choices.map((choice) => {
    const text = choice.token.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "nothing";
    const cells = [text, percent(Math.exp(choice.logprob))].map((cell) => element("span", { textContent: cell }));
    const line = element("div", { className: isChosen(choice) ? "choice chosen" : "choice" }, ...cells);
    line.style.setProperty("--share", Math.exp(choice.logprob));
    return line;
  });
  return element("div", { className: "choices" }, ...lines);
}

function showTip(span) {
  const tip = byId("tip");
  tip.replaceChildren(...span.tokens.map(choicesOf));
  tip.hidden = false;
  span.setAttribute("aria-describedby", "tip");
  const at = span.getClientRects()[0];
  const { width, height } = tip.getBoundingClientRect();
  const isBelow = at.bottom + height + 12 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  tip.style.top = `${isBelow ? at.bottom + 6 : at.top - height - 6}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

for (const kind of ["pointerover", "focusin"]) {
  byId("messages").addEventListener(kind, ({ target }) => (target.tokens ? showTip(target) : hideTip()));
}
for (const kind of ["pointerleave", "focusout"]) byId("messages").addEventListener(kind, hideTip);
addEventListener("scroll", hideTip, true);
addEventListener("keydown", ({ key }) => key === "Escape" && hideTip());

// --- the stream of the engines ---------------------------------------------------------------------------------------

const memories = new Map(); // rank: Memory
let following = null; // the AbortController of the stream, while the page is visible
let shown = 0; // the rank of the engine that is shown

/** Follow the stream until the page is hidden. A lost one is tried again, after longer and longer pauses. */
async function follow() {
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
    const response = await ask("live", { signal: AbortSignal.any([signal, silence.signal]) });
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

/** What the page remembers of an engine: its latest snapshot, and what came before it. The latest is last. */
class Memory {
  engine = null;
  steps = [];
  finished = []; // each with a number of its own, `serial`
  rates = []; // {time, counters, generated, prompt, hits} for SPAN seconds
  flashes = []; // {block, way, begun}
  serial = 0;

  /** Whether a snapshot is from the same run of the engine. */
  goesOn(engine) {
    return engine.counters.generation_tokens >= this.engine.counters.generation_tokens;
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

/** A tab for each engine, where there are several. */
function showTabs(ranks) {
  if (!ranks.includes(shown)) shown = ranks[0];
  const tabs = byId("engines");
  if (tabs.dataset.ranks === String(ranks)) return;
  tabs.dataset.ranks = ranks;
  tabs.hidden = ranks.length < 2;
  tabs.replaceChildren(tabs.firstElementChild, ...ranks.map((rank) => {
    const choose = () => {
      shown = rank;
      soon(draw);
    };
    const input = element("input", { type: "radio", name: "engine", checked: rank === shown, onchange: choose });
    return element("label", {}, input, `Engine ${rank}`);
  }));
}

byId("reconnect").onclick = follow;
document.onvisibilitychange = () => (document.hidden ? following?.abort() : follow());

// --- drawing ---------------------------------------------------------------------------------------------------------

const still = matchMedia("(prefers-reduced-motion: reduce)");
const asked = new Set(); // drawings that the next frame has
let inks = {}; // the colours of the legends: what is drawn has the colours that they show
let highlighted = null; // the key of the request whose blocks stand out

/** Draw what is known of the engine that is shown, with the next frame. */
function soon(drawing) {
  if (asked.has(drawing)) return;
  asked.add(drawing);
  requestAnimationFrame((now) => {
    asked.delete(drawing);
    if (memories.has(shown)) drawing(memories.get(shown), now);
  });
}

function draw(memory, now) {
  const swatches = [...document.querySelectorAll("[data-ink]")];
  inks = Object.fromEntries(swatches.map((ink) => [ink.dataset.ink, getComputedStyle(ink).backgroundColor]));
  showFigures(memory);
  drawMap(memory, now);
  fillRequests(memory.engine);
  fillFinished(memory.finished);
  drawSteps(memory.steps);
  drawLatency(memory.finished);
  drawRates(memory.rates);
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

function showFigures({ engine, rates }) {
  const { free, cached } = tally(engine);
  const { generated, hits } = rates.at(-1);
  for (const state of ["running", "waiting", "swapped"]) put(byId(state), whole.format(engine.counts[state]));
  put(byId("used"), `${whole.format(100 * (1 - (free + cached) / engine.num_blocks))} %`);
  put(byId("rate"), whole.format(generated));
  put(byId("hits"), `${whole.format(100 * hits)} %`);
}

/** How many blocks are free, cached, shared, or of one request. @param {Engine} engine */
function tally(engine) {
  const counts = { free: 0, cached: 0, shared: 0, owned: 0 };
  for (const [owner, length] of engine.blocks) counts[OWNERS[owner] ?? "owned"] += length;
  return counts;
}

function hueOf(key) {
  return (key * 137.508) % 360; // by the golden angle, so that keys that are near have hues that are not
}

function drawMap({ engine, flashes }, now) {
  const canvas = byId("blocks");
  const side = cellSide(engine.num_blocks, canvas.clientWidth);
  const columns = Math.floor(canvas.clientWidth / side);
  canvas.style.height = `${Math.ceil(engine.num_blocks / columns) * side}px`;
  const { pen, width, height } = clean(canvas);
  const isLit = engine.requests.some(({ key }) => key === highlighted);
  let at = 0;
  for (const [owner, length] of engine.blocks) {
    pen.fillStyle = inks[OWNERS[owner]] ?? `oklch(0.64 0.12 ${hueOf(owner)})`;
    pen.globalAlpha = isLit && owner !== highlighted ? 0.25 : 1;
    for (const end = at + length; at < end; ) {
      const count = Math.min(end - at, columns - (at % columns)); // up to the end of its line
      pen.fillRect((at % columns) * side, Math.floor(at / columns) * side, count * side, side);
      at += count;
    }
  }
  const gap = side >= 12 ? 2 : side >= 4 ? 1 : 0;
  for (let x = side; x <= width; x += side) pen.clearRect(x - gap, 0, gap, height);
  for (let y = side; y <= height; y += side) pen.clearRect(0, y - gap, width, gap);
  drawFlashes(pen, flashes, side, columns, now);
  put(byId("blocks-text"), mapWords(engine));
}

/** The largest side, in CSS pixels, at which so many cells fill no more than a quarter as much height as width. */
function cellSide(count, width) {
  const height = Math.max(width / 4, 150);
  let side = 26;
  while (side > 0.5 && Math.floor(width / side) * Math.floor(height / side) < count) side -= side > 4 ? 1 : 0.5;
  return side;
}

/** Blocks that leave for the host rise and fade; those that come back sink into their place. */
function drawFlashes(pen, flashes, side, columns, now) {
  while (flashes.length && now - flashes[0].begun > FLASH) flashes.shift();
  pen.fillStyle = inks.moved;
  for (const { block, way, begun } of flashes) {
    const part = Math.max(0, (now - begun) / FLASH);
    const lift = still.matches ? 0 : Math.max(side, 8) * (way === "out" ? part : 1 - part);
    pen.globalAlpha = still.matches ? 1 : 1 - part;
    const size = Math.max(3, side - 1);
    pen.fillRect((block % columns) * side, Math.floor(block / columns) * side - lift, size, size);
  }
  pen.globalAlpha = 1;
  if (flashes.length && !still.matches) soon(drawMap);
}

function mapWords(engine) {
  const { free, cached, shared, owned } = tally(engine);
  const { out, in: back, copies } = engine.moves;
  const words = [
    `${whole.format(owned + shared)} of ${plural(engine.num_blocks, "block")} of ${engine.block_size} tokens in use`,
    `${whole.format(shared)} shared`, `${whole.format(cached)} cached`, `${whole.format(free)} free`,
  ];
  if (engine.num_host_blocks) words.push(`${whole.format(engine.num_host_blocks)} more on the host`);
  if (out + back + copies) words.push(`now moving: ${out} out, ${back} in, ${copies} copied`);
  return words.join(" · ");
}

/** Bars of two parts from the right, the latest last. @param {{parts: number[], mark?: boolean}[]} bars */
function drawBars(id, bars, most, names) {
  const { pen, width, height } = clean(byId(id));
  const step = width / most;
  const top = Math.max(...bars.map(({ parts: [lower, upper] }) => lower + upper));
  bars.forEach(({ parts, mark }, i) => {
    const x = width - (bars.length - i) * step;
    let y = height;
    parts.forEach((part, which) => {
      const tall = part && Math.max(1.5, (part / top) * (height - 10)); // above is room for marks
      pen.fillStyle = inks[names[which]];
      pen.fillRect(x, (y -= tall), Math.max(1, step - (step > 3 ? 1 : 0)), tall);
    });
    if (!mark) return;
    pen.fillStyle = inks.preempted;
    pen.fill(new Path2D(`M${x + step / 2} ${y - 2}l-4-6h8z`));
  });
}

function drawSteps(steps) {
  const bars = steps.map(({ prefill, decode, preempted }) => ({ parts: [decode, prefill], mark: preempted > 0 }));
  drawBars("steps", bars, MOST_STEPS, ["decode", "prefill"]);
  const last = steps.at(-1);
  if (!last) return put(byId("steps-text"), "No step has run yet.");
  const lost = last.preempted ? `, ${last.preempted} preempted` : "";
  const rows = `${whole.format(last.decode)} decoding, ${plural(last.prefill, "prompt token")}${lost}`;
  put(byId("steps-text"), `Step ${whole.format(last.step)}: ${rows}, ${duration(last.ms / 1000)}`);
}

function drawLatency(finished) {
  const timed = finished.filter(({ ttft, e2e }) => ttft !== null && e2e !== null);
  drawBars("latency", timed.map(({ ttft, e2e }) => ({ parts: [ttft, e2e - ttft] })), MOST_FINISHED, ["first", "rest"]);
  if (!timed.length) return put(byId("latency-text"), "No request has finished yet.");
  const median = (name) => duration(timed.map((end) => end[name]).sort((a, b) => a - b)[Math.floor(timed.length / 2)]);
  put(byId("latency-text"), `Median of the last ${timed.length}: first token ${median("ttft")}, end ${median("e2e")}`);
}

function drawRates(rates) {
  const { generated, prompt, hits } = rates.at(-1);
  drawLine("throughput", rates, "generated", Math.max(...rates.map((rate) => rate.generated)));
  drawLine("prefix", rates, "hits", 1);
  const words = `${whole.format(generated)} generated and ${whole.format(prompt)} prompt tokens a second`;
  put(byId("throughput-text"), words);
  put(byId("prefix-text"), `${percent(hits)} of prompt tokens were found in the cache since the start`);
}

function drawLine(id, rates, name, top) {
  const { pen, width, height } = clean(byId(id));
  const end = rates.at(-1).time;
  const places = rates.map((rate) => [
    width * (1 - (end - rate.time) / SPAN), height - (rate[name] / (top || 1)) * (height - 6),
  ]);
  pen.beginPath();
  for (const [x, y] of places) pen.lineTo(x, y);
  pen.strokeStyle = pen.fillStyle = inks.decode;
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
  row.title = item.id ?? "only its own API key may know more of it";
  put(name, item.id === null ? "another key’s request" : shortened(item.id));
  put(told, facts.filter(Boolean).join(" · "));
}

function fillRequests({ requests, counts }) {
  const samples = new Map(); // met so far of each request, by its key
  const keyOf = ({ key }) => {
    samples.set(key, (samples.get(key) ?? 0) + 1);
    return `${key}.${samples.get(key)}`;
  };
  fill(byId("requests"), requests, keyOf, (row, request) => {
    const { key, state, prompt, computed, output, preemptions } = request;
    const done = computed < prompt ? `${computed} of ${prompt} read` : `${output} out`;
    updateRow(row, request, [done, preemptions && `preempted ${preemptions}×`, state]);
    row.style.setProperty("--hue", hueOf(key));
  });
  const words = `${counts.running} running, ${counts.swapped} swapped out, ${counts.waiting} waiting`;
  put(byId("requests-text"), requests.length ? words : "Nothing runs.");
}

function fillFinished(finished) {
  fill(byId("finished"), finished.toReversed(), ({ serial }) => serial, (row, end) => {
    const { prompt, output, preemptions, e2e } = end;
    const again = preemptions && `preempted ${preemptions}×`;
    updateRow(row, end, [`${prompt} in, ${output} out`, again, e2e && duration(e2e)]);
  });
}

for (const list of [byId("requests"), byId("finished")]) {
  const itemOf = ({ target }) => target.closest(".row")?.item;
  list.onclick = (event) => itemOf(event) && explain(itemOf(event).id);
  for (const kind of ["pointerover", "focusin"]) {
    list.addEventListener(kind, (event) => (highlighted = itemOf(event)?.key ?? null));
  }
  for (const kind of ["pointerleave", "focusout"]) list.addEventListener(kind, () => (highlighted = null));
}

// --- where the time of a request went --------------------------------------------------------------------------------

/** Tell the story of a request, anew each second while it runs. */
async function explain(id) {
  const closed = new AbortController();
  const tell = (...parts) => byId("story-body").replaceChildren(...parts);
  put(byId("story-id"), id);
  tell("Asking the engine …");
  byId("story").onclose = () => closed.abort();
  byId("story").showModal();
  try {
    for (;;) {
      const response = await ask(`explain/${encodeURIComponent(id)}`, { signal: closed.signal });
      const { prompts } = await response.json();
      tell(...prompts.flatMap(storyOf));
      if (prompts.every(({ finished }) => finished)) return;
      await sleep(1, closed.signal);
    }
  } catch (error) {
    if (!closed.signal.aborted) tell(element("p", { className: "trouble", textContent: sentence(error.message) }));
  }
}

/** Seconds until the first token of a request that the stream has told of; else null. */
function firstTokenOf(requestId) {
  const ends = [...memories.values()].flatMap(({ finished }) => finished);
  return ends.find(({ id }) => id && requestId === `${id}-0`)?.ttft ?? null;
}

function storyOf(prompt) {
  return prompt.answers.map(({ state, finish_reason: reason, output_tokens: output, stays, ahead }) => {
    const phases = phasesOf(stays, prompt.answers.length === 1 ? firstTokenOf(prompt.request_id) : null);
    const facts = [
      `${duration(prompt.seconds)} ${prompt.finished ? "in all" : "so far"}`,
      `${plural(prompt.prompt_tokens, "prompt token")}, ${output} out`, reason ? `ended by ${reason}` : state,
      ahead && `${plural(ahead, "other")} ahead of it`,
    ];
    const lines = phases.map((phase) => element("li", {}, phaseMark("ink", phase), sentence(phase.words),
      element("span", { className: "soft", textContent: duration(phase.seconds) })));
    return element("section", { className: "told" },
      element("p", { className: "soft", textContent: facts.filter(Boolean).join(" · ") }),
      element("div", { className: "track" }, ...phases.map((phase) => phaseMark("part", phase))),
      element("ol", { className: "phases" }, ...lines));
  });
}

function phaseMark(kind, { state, seconds }) {
  const mark = element("span", { className: `${kind} ${state}` });
  mark.style.setProperty("--milliseconds", 1000 * seconds);
  return mark;
}

/** The phases of an answer in words. The run in which the first token came is cut there. @param {Stay[]} stays */
function phasesOf(stays, first) {
  let begun = 0;
  return stays.flatMap((stay) => {
    const { state, seconds } = stay;
    const [start, end] = [begun, (begun += seconds)];
    if (state === "held") return { state, seconds, words: "held until another answer has computed the prompt" };
    if (state !== "running") return waitsOf(stay);
    const read = prefillWords(stay);
    if (!read || first === null || first <= start || first >= end) {
      return { state, seconds, words: `${read && `${read}, then `}decoded${endWords(stay)}` };
    }
    return [
      { state: "prefill", seconds: first - start, words: read },
      { state, seconds: end - first, words: `decoded${endWords(stay)}` },
    ];
  });
}

function waitsOf({ state, seconds, waited_for: reasons, served_instead: rival, started_over: again }) {
  const where = state === "swapped" ? "swapped out to the host, waited" : "waited";
  const more = (rival ? `, while client ${rival.client} ran ${plural(rival.sequences, "sequence")}` : "")
    + (again ? ", after a worker was replaced" : "");
  if (!reasons) return { state, seconds, words: where + more };
  return Object.entries(reasons).map(([reason, part]) => (
    { state, seconds: part, words: `${where} for ${WAITS[reason] ?? reason}${more}` }
  ));
}

function prefillWords(stay) {
  const { chunks, further_chunks: further = 0, cached_tokens: cached, recomputed_tokens: again } = stay;
  if (!chunks) return "";
  const sizes = `${chunks.slice(0, 6).join(", ")}${chunks.length > 6 ? ", …" : ""}`;
  const words = [`computed the prompt in ${plural(chunks.length + further, "chunk")} of ${sizes} tokens`];
  if (cached) words.unshift(`found ${plural(cached, "token")} in the prefix cache`);
  if (stay.prefix_cache) words.push(`the prefix cache was ${stay.prefix_cache}`);
  if (again) words.push(`${plural(again, "token")} were computed again`);
  return words.join(", ");
}

function endWords({ preempted }) {
  if (!preempted) return "";
  const { for: cause, by, tokens } = preempted;
  return `, was then preempted by ${by} for ${shortened(cause)}, with ${plural(tokens, "token")} computed`;
}

for (const close of document.querySelectorAll("dialog .quiet")) close.onclick = () => close.closest("dialog").close();

// --- the start -------------------------------------------------------------------------------------------------------

matchMedia("(prefers-color-scheme: dark)").onchange = () => soon(draw);
new ResizeObserver(() => soon(draw)).observe(byId("live"));
showModel().catch((error) => put(byId("model"), sentence(error.message)));
if (!document.hidden) follow();
