/**
 * What outlives a reload: the chats, in the browser's storage. A browser may refuse to store anything, or be full. Then
 * the page remembers for itself until it is closed, and nothing throws.
 *
 * @typedef {{id: string, name: string, arguments: string, result?: string}} Call   of a tool
 * @typedef {{reasoning: string, content: string, calls: Call[]}} Round   what a model wrote in one go
 * @typedef {{parent: number, role: "user", content: string, pictures?: string[]} | {parent: number, role: "assistant", rounds: Round[],
 *   id?: string, words?: string, trouble?: string}} Turn   `parent` is the index of the turn before it, or -1
 * @typedef {{id: string, changed: number, leaf: number, turns: Turn[]}} Chat   a tree; `leaf` is the last turn shown
 *
 * Pictures, which are data URLs, are too large to be stored: empty texts stand for them.
 */

const MOST_CHATS = 50;
const MOST_CHARACTERS = 2_000_000; // of all chats together; browsers store 5 million or so
const KEY = `manta-chats:${location.pathname}`; // servers under several paths of a host are apart

const remembered = { localStorage: new Map(), sessionStorage: new Map() }; // where the browser stores nothing

/** @param {"localStorage" | "sessionStorage"} area */
export function recall(area, key) {
  if (remembered[area].has(key)) return remembered[area].get(key);
  try {
    return window[area].getItem(key);
  } catch {
    return null;
  }
}

/** Whether the browser has stored it. If not, the page remembers it. */
export function keep(area, key, value) {
  try {
    window[area].setItem(key, value);
    remembered[area].delete(key);
    return true;
  } catch {
    remembered[area].set(key, value);
    return false;
  }
}

// --- chats -----------------------------------------------------------------------------------------------------------

/** The saved chats, the latest first. */
export function savedChats() {
  try {
    return JSON.parse(recall("localStorage", KEY) ?? "[]").filter(isChat);
  } catch {
    return [];
  }
}

/** @param {Chat} chat */
export function saveChat(chat) {
  write([chat, ...savedChats().filter(({ id }) => id !== chat.id)]);
}

export function forgetChat(id) {
  write(savedChats().filter((chat) => chat.id !== id));
}

/** Store as many of the latest chats as there is room for. */
function write(chats) {
  const texts = chats.sort((a, b) => b.changed - a.changed).slice(0, MOST_CHATS)
    .map((chat) => JSON.stringify(chat, (key, value) => (key === "pictures" ? value.map(() => "") : value)));
  const total = () => texts.reduce((sum, text) => sum + text.length, 0);
  while (texts.length > 1 && total() > MOST_CHARACTERS) texts.pop();
  const all = texts.join();
  while (!keep("localStorage", KEY, `[${texts.join()}]`) && texts.length > 1) texts.pop();
  if (remembered.localStorage.has(KEY)) remembered.localStorage.set(KEY, `[${all}]`);
}

function isChat(chat) {
  return typeof chat?.id === "string" && typeof chat.changed === "number" && Array.isArray(chat.turns)
    && chat.turns.length > 0 && chat.turns.every(isTurn) && Number.isInteger(chat.leaf) && chat.leaf in chat.turns;
}

function isTurn(turn, i) {
  if (!Number.isInteger(turn?.parent) || turn.parent < -1 || turn.parent >= i) return false;
  const { pictures = [] } = turn;
  if (!Array.isArray(pictures) || !pictures.every((url) => typeof url === "string")) return false;
  return turn.role === "user" ? typeof turn.content === "string"
    : turn.role === "assistant" && Array.isArray(turn.rounds) && turn.rounds.every(isRound);
}

function isRound(round) {
  const areText = (owner, ...names) => names.every((name) => typeof owner?.[name] === "string");
  return areText(round, "reasoning", "content") && Array.isArray(round.calls)
    && round.calls.every((call) => areText(call, "id", "name", "arguments"));
}
