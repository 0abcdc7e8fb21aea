/**
 * The chat: /v1/chat/completions, and the tree of turns that it makes.
 *
 * A message that is edited and an answer that is made again stay beside the ones before them, as further children of the
 * same turn. The page shows the path from the first turn to the leaf.
 */

import { setPictures, takePictures } from "./pictures.js";
import { ask, eventsOf } from "./server.js";
import { inPlainWords, mark, settings, systemPrompt } from "./settings.js";
import { byId, duration, element, firstWords, link, plural, put, whole } from "./small.js";
import { saveChat } from "./storage.js";
import { explain } from "./story.js";
import { run } from "./tools.js";
import { AnswerView, arrows, copyTurn, textOf, UserView } from "./turns.js";

const MOST_ROUNDS = 8; // of calls in one answer
const SHORTEST = 0.02; // seconds between two events over which a rate is told
const FRAME = 16; // milliseconds between two drawings of an answer that grows

/** The first words of the questions of this page's own requests, by the id that the engine knows. */
export const questions = new Map();

let chat = newChat();
let answering = null; // {chat, turn, controller} of the answer that is being written
let listening = () => {}; // told when another chat is shown, or a chat has been saved
const views = new WeakMap(); // of turns

function newChat() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, changed: Date.now(), leaf: -1, turns: [] };
}

export const currentChat = () => chat;

export function onChange(listener) {
  listening = listener;
}

/** Show another chat, or a new one. An answer that is being written stops. @param {import("./storage.js").Chat} other */
export function open(other = newChat()) {
  stop();
  chat = other;
  byId("refusal").hidden = true;
  show();
  scrollDown();
  focusPrompt();
  listening();
}

// --- the tree --------------------------------------------------------------------------------------------------------

/** The indices of the turns from the first to `leaf`. */
function pathTo({ turns }, leaf) {
  const path = [];
  for (let i = leaf; i >= 0; i = turns[i].parent) path.unshift(i);
  return path;
}

/** The turns that are shown. */
export function shownTurns() {
  return pathTo(chat, chat.leaf).map((i) => chat.turns[i]);
}

function childrenOf({ turns }, parent) {
  return turns.flatMap((turn, i) => (turn.parent === parent ? [i] : []));
}

/** The end of the latest path through a turn. */
function leafBelow(tree, i) {
  for (let below; (below = childrenOf(tree, i)).length; ) i = below.at(-1);
  return i;
}

function add(tree, turn) {
  tree.turns.push(turn);
  tree.leaf = tree.turns.length - 1;
  return turn;
}

// --- what is shown ---------------------------------------------------------------------------------------------------

function viewOf(turn) {
  if (!views.has(turn)) views.set(turn, turn.role === "user" ? new UserView(turn) : new AnswerView(turn));
  return views.get(turn);
}

function show() {
  const path = pathTo(chat, chat.leaf);
  byId("messages").replaceChildren(...path.map((i) => viewOf(chat.turns[i]).item));
  for (const i of path) drawActions(i);
  byId("welcome").hidden = path.length > 0;
}

/** The line below a turn: what an answer took or what went wrong, and what can be done now. */
function drawActions(i) {
  const turn = chat.turns[i];
  const { actions } = viewOf(turn);
  if (answering?.turn === turn) return actions.replaceChildren();
  const siblings = childrenOf(chat, turn.parent);
  const go = (at) => {
    chat.leaf = leafBelow(chat, siblings[at]);
    show();
    viewOf(chat.turns[siblings[at]]).actions.querySelector(".versions button:enabled")?.focus();
    saveChat(chat);
  };
  const versions = arrows({ count: siblings.length, at: siblings.indexOf(i) }, go);
  if (turn.role === "user") return actions.replaceChildren(...versions, link("Edit", () => edit(i)));
  const words = turn.trouble ?? turn.words ?? "stopped";
  const parts = [...versions, element("span", { className: turn.trouble ? "trouble" : "soft", textContent: words })];
  if (textOf(turn)) parts.push(copyTurn(turn));
  if (turn.id) parts.push(link("Explain", () => explain(turn.id)));
  parts.push(link(turn.trouble ? "Try again" : "Regenerate", () => regenerate(i)));
  actions.replaceChildren(...parts);
}

function isAtBottom() {
  const { scrollHeight, scrollTop, clientHeight } = byId("conversation");
  return scrollHeight - scrollTop - clientHeight < 40;
}

function scrollDown() {
  byId("conversation").scrollTop = byId("conversation").scrollHeight;
}

/** Put the cursor into the composer, but take it from nobody, and open no keyboard on a screen that is touched. */
export function focusPrompt() {
  const { activeElement: focused } = document;
  const isFree = !focused || focused === document.body || byId("composer").contains(focused);
  if (isFree && matchMedia("(pointer: fine)").matches) byId("prompt").focus({ preventScroll: true });
}

function showBusy(busy) {
  const focused = document.activeElement;
  byId("chat").classList.toggle("busy", busy);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  if (focused === byId("stop")) byId("prompt").focus({ preventScroll: true });
}

// --- what a user does ------------------------------------------------------------------------------------------------

export function send(content, pictures = []) {
  if (answering) return;
  const before = chat.leaf;
  add(chat, { parent: before, role: "user", content, pictures });
  answer(() => {
    takeBack(2, before);
    setPictures(pictures);
    byId("prompt").value = [content, byId("prompt").value].filter(Boolean).join("\n");
    return "Your message was not sent";
  });
}

function edit(i, content = chat.turns[i].content) {
  viewOf(chat.turns[i]).edit(content, (changed) => {
    if (answering) return false;
    const before = chat.leaf;
    add(chat, { ...chat.turns[i], content: changed });
    answer(() => {
      takeBack(2, before);
      edit(i, changed);
      return "The edited message was not sent";
    });
    return true;
  });
}

function regenerate(i) {
  if (answering) return;
  const before = chat.leaf;
  chat.leaf = chat.turns[i].parent;
  answer(() => {
    takeBack(1, before);
    return "There is no new answer";
  });
}

/** Drop the latest turns, which the server refused, and show the path to `leaf` again. */
function takeBack(count, leaf) {
  chat.turns.splice(-count);
  chat.leaf = leaf;
  show();
}

export function stop() {
  answering?.controller.abort();
}

// --- an answer -------------------------------------------------------------------------------------------------------

/** What the server is sent of the chat so far. A round that was stopped before its first token is left out. */
function messagesFor(tree, leaf) {
  const system = systemPrompt();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of pathTo(tree, leaf).map((i) => tree.turns[i])) {
    if (turn.role === "user") messages.push({ role: "user", content: contentOf(turn) });
    else for (const round of turn.rounds) messages.push(...messagesOf(round));
  }
  return messages;
}

/** The content of a user's message: a text, or parts where there are pictures. */
function contentOf({ content, pictures = [] }) {
  const parts = pictures.filter(Boolean).map((url) => ({ type: "image_url", image_url: { url } }));
  if (!parts.length) return content;
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** @param {import("./storage.js").Round} round */
function messagesOf({ content, calls }) {
  const done = calls.filter(({ result }) => result !== undefined);
  if (!done.length) return content ? [{ role: "assistant", content }] : [];
  const called = done.map(({ id, name, arguments: given }) => (
    { id, type: "function", function: { name, arguments: given } }
  ));
  const results = done.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
  return [{ role: "assistant", content, tool_calls: called }, ...results];
}

/** Have the next answer written. `giveUp` takes back what the server will never take, and says what that means. */
async function answer(giveUp) {
  const mine = chat;
  const turn = { parent: mine.leaf, role: "assistant", rounds: [] };
  const body = settings();
  views.set(turn, new AnswerView(turn, Boolean(body.logprobs)));
  add(mine, turn);
  const leaf = mine.leaf;
  const facts = { begun: performance.now(), tokens: 0, steady: 0, seconds: 0, model: body.model };
  answering = { chat: mine, turn, controller: new AbortController() };
  byId("refusal").hidden = true;
  mark(null);
  show();
  showBusy(true);
  scrollDown();
  let failure = null;
  try {
    await writeRounds(answering, leaf, body, facts);
  } catch (error) {
    facts.reason = "stopped";
    if (!answering.controller.signal.aborted) failure = error;
  }
  viewOf(turn).rounds.at(-1)?.tokens?.end();
  turn.words = summaryOf(facts);
  answering = null;
  showBusy(false);
  if (failure) mark(failure.param);
  if (failure?.isFinal && chat === mine && !textOf(turn)) {
    put(byId("refusal"), `${giveUp()}. ${inPlainWords(failure)}`);
    byId("refusal").hidden = false;
  } else {
    conclude(mine, turn, failure);
  }
  save(mine);
  if (chat === mine) focusPrompt();
}

/** Write rounds until one calls no tool. */
async function writeRounds({ chat: mine, turn, controller: { signal } }, leaf, body, facts) {
  const view = viewOf(turn);
  for (let count = 1; ; count++) {
    const round = { reasoning: "", content: "", calls: [] };
    turn.rounds.push(round);
    const messages = messagesFor(mine, leaf);
    const options = { include_usage: true, continuous_usage_stats: true };
    const request = { messages, stream: true, stream_options: options, ...body };
    await writeRound(request, signal, turn, round, view.begin(), facts);
    if (facts.reason !== "tool_calls") return;
    if (count === MOST_ROUNDS) throw new Error(`the model called tools ${MOST_ROUNDS} times on end`);
    for (const call of round.calls) call.result = run(call);
    view.draw(view.rounds.at(-1), round);
  }
}

async function writeRound(request, signal, turn, round, view, facts) {
  const headers = { "Content-Type": "application/json" };
  const options = { method: "POST", headers, body: JSON.stringify(request), signal };
  const counted = { before: facts.tokens };
  let [drawing, took] = [0, 0];
  const draw = () => {
    clearTimeout(drawing);
    drawing = 0;
    const begun = performance.now();
    const atBottom = isAtBottom();
    viewOf(turn).draw(view, round);
    if (atBottom) scrollDown();
    took = performance.now() - begun;
  };
  facts.reason = null;
  try {
    for await (const event of eventsOf(await ask("v1/chat/completions", options))) {
      take(event, turn, round, view, facts, counted);
      drawing ||= setTimeout(draw, Math.max(FRAME, took)); // half of the time is for all else, however long it is
    }
  } finally {
    draw();
    facts.steady += Math.max(0, facts.tokens - counted.before - (counted.atFirst ?? 0));
    facts.seconds += counted.first ? (counted.last - counted.first) / 1000 : 0;
  }
  if (!facts.reason) throw new Error("the answer broke off");
}

/** One event of an answer. */
function take(event, turn, round, view, facts, counted) {
  if (event.error) throw new Error(event.error.message);
  if (turn.id !== event.id) questions.set((turn.id = event.id), firstWords(questionOf(turn)));
  const tokens = event.usage?.completion_tokens ?? 0;
  for (const { delta, logprobs, finish_reason: reason } of event.choices) {
    facts.reason = reason ?? facts.reason;
    round.content += delta.content ?? "";
    round.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) takeCall(round.calls, part);
    // Tokens that come with the end and without text have ended the answer, and are no part of it.
    for (const token of logprobs?.content ?? []) view.tokens?.add(token, Boolean(reason && !delta.content));
  }
  if (round.content || round.reasoning || round.calls.length) {
    counted.last = performance.now();
    facts.first ??= counted.last;
    counted.first ??= counted.last;
    counted.atFirst ??= tokens;
  }
  if (tokens) facts.tokens = counted.before + tokens;
}

function takeCall(calls, { index, id, function: part }) {
  const call = (calls[index] ??= { id: "", name: "", arguments: "" });
  call.id += id ?? "";
  call.name += part?.name ?? "";
  call.arguments += part?.arguments ?? "";
}

function questionOf(turn) {
  const { turns } = answering.chat;
  return turns[turn.parent]?.content ?? "";
}

/** Say how an answer ended. */
function conclude(mine, turn, failure) {
  if (failure) turn.trouble = inPlainWords(failure);
  if (chat !== mine) return; // another chat is shown
  const atBottom = isAtBottom();
  show();
  put(byId("announcer"), turn.trouble ?? `The model: ${textOf(turn)}`);
  if (atBottom) scrollDown();
}

function summaryOf({ tokens, steady, seconds, begun, first, reason, model }) {
  const parts = tokens ? [plural(tokens, "token")] : [];
  const [count, time] = seconds > SHORTEST ? [steady, seconds] : [tokens, (performance.now() - begun) / 1000];
  const rate = count / time;
  if (tokens) parts.push(`${rate < 10 ? rate.toFixed(1) : whole.format(rate)} tokens/s`);
  if (first) parts.push(`first after ${duration((first - begun) / 1000)}`);
  if (reason === "length") parts.push("cut at the longest length");
  else if (reason !== "stop") parts.push(reason);
  if (model) parts.push(model);
  return parts.join(" · ");
}

function save(mine) {
  mine.changed = Date.now();
  if (mine.turns.length) saveChat(mine);
  listening();
}

// --- the start -------------------------------------------------------------------------------------------------------

byId("composer").onsubmit = (event) => {
  event.preventDefault();
  const content = byId("prompt").value.trim();
  if (answering || !(content || byId("pictures").childElementCount)) return;
  byId("prompt").value = "";
  send(content, takePictures());
};
byId("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
};
byId("stop").onclick = stop;
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented && !document.querySelector("dialog[open]")) stop();
});
addEventListener("pagehide", () => answering && save(answering.chat)); // so that a reload keeps what has been written
