/** The settings of the chat: what they add to a request, and how an error names them. */

import { byId, element, put, sentence } from "./small.js";
import { keep, recall } from "./storage.js";
import { TOOLS } from "./tools.js";

const ALTERNATIVES = 5; // for each token
const KEY = `manta-settings:${location.pathname}`;

const inputs = [...byId("fields").querySelectorAll("input")];
const texts = [byId("system"), ...inputs];
const switches = [byId("logprobs"), byId("calculator")];
const labelOf = (input) => input.labels[0].textContent.trim();

/** The system prompt, or an empty text. */
export function systemPrompt() {
  return byId("system").value.trim();
}

/** The model that was chosen, where there are several; else an empty text. */
export function chosenModel() {
  return byId("choice").hidden ? "" : byId("models").value;
}

/** The fields of a request. What is no number is sent as it was typed, and the server says what is wrong. */
export function settings() {
  const body = {};
  for (const { name, value } of inputs) {
    if (value.trim()) body[name] = Math.abs(value) <= Number.MAX_SAFE_INTEGER ? Number(value) : value;
  }
  if (chosenModel()) body.model = chosenModel();
  if (byId("calculator").checked) body.tools = TOOLS;
  // Where the tokens are shown, what a model writes for itself stays among them.
  if (byId("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES, separate_reasoning: false });
  return body;
}

/** An error in the words of the page: fields have the names that their labels have. */
export function inPlainWords({ message, param }) {
  const named = inputs.filter(({ name }) => name === param || name.includes("_"));
  const words = named.reduce((text, input) => text.replace(new RegExp(`\\b${input.name}\\b`, "g"), labelOf(input)), message);
  return sentence(words);
}

/** Show which field an error is about, if it is one of these. */
export function mark(param) {
  for (const input of inputs) input.ariaInvalid = input.name === param ? "true" : null;
  if (inputs.some(({ name }) => name === param)) byId("settings").open = true;
}

// --- what outlives a reload ------------------------------------------------------------------------------------------

/** What was chosen and typed the last time, by the names of the fields. */
function kept() {
  try {
    return JSON.parse(recall("localStorage", KEY)) ?? {};
  } catch {
    return {};
  }
}

function save() {
  const fields = [byId("models"), ...texts].map(({ name, value }) => [name, value]);
  const positions = switches.map(({ id, checked }) => [id, checked]);
  keep("localStorage", KEY, JSON.stringify(Object.fromEntries([...fields, ...positions])));
  showWhetherChanged();
}

/** What is out of sight should surprise nobody. */
function showWhetherChanged() {
  const changed = texts.some(({ value }) => value.trim()) || switches.some(({ checked }) => checked);
  put(byId("settings-summary"), changed ? "Settings (changed)" : "Settings");
}

/** Let the user choose, where there are several models. */
export function offerModels(names) {
  const { model } = kept();
  const options = names.map((name) => element("option", { textContent: name, selected: name === model }));
  byId("models").replaceChildren(...options);
  byId("choice").hidden = names.length < 2;
  if (names.length > 1) byId("models").dispatchEvent(new Event("change"));
}

for (const field of texts) field.value = kept()[field.name] ?? "";
for (const each of switches) each.checked = kept()[each.id] ?? false;
showWhetherChanged();
for (const field of [byId("models"), ...texts, ...switches]) field.addEventListener("input", save);
byId("fields").oninput = ({ target }) => (target.ariaInvalid = null);
