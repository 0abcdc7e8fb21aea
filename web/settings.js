/** The settings of the chat: what they add to a request, and how an error names them. */

import { byId, sentence } from "./small.js";
import { TOOLS } from "./tools.js";

const ALTERNATIVES = 5; // for each token

const inputs = [...byId("fields").querySelectorAll("input")];
const labelOf = (input) => input.labels[0].textContent.trim();

/** The system prompt, or an empty text. */
export function systemPrompt() {
  return byId("system").value.trim();
}

/** The fields of a request. What is no number is sent as it was typed, and the server says what is wrong. */
export function settings() {
  const body = {};
  for (const { name, value } of inputs) {
    if (value.trim()) body[name] = Math.abs(value) <= Number.MAX_SAFE_INTEGER ? Number(value) : value;
  }
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

byId("fields").oninput = ({ target }) => (target.ariaInvalid = null);
