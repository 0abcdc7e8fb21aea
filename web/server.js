/** How the page asks its server: with the API key where one is wanted, and errors in words. */

import { byId } from "./small.js";
import { keep, recall } from "./storage.js";

export class KeyWanted extends Error {}

let keyQuestion = null; // the promise of the dialog that is open, if it is

/** A reply of the server's that is no error; asks for the API key where the server wants one. */
export async function ask(path, options = {}) {
  for (;;) {
    const key = recall("sessionStorage", "key");
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers }).catch(unreachable);
    if (response.ok) return response;
    if (response.status !== 401) throw await errorOf(response);
    if (recall("sessionStorage", "key") === key) await askForKey(key !== null); // else it has just been given
  }
}

/** The browser's own words for a connection that fails say little. */
function unreachable(error) {
  throw error.name === "AbortError" ? error : new Error("the server cannot be reached");
}

/** What went wrong: `param` is the field, and `isFinal` says that the server would refuse the same messages again. */
async function errorOf(response) {
  const error = (await response.json().catch(() => null))?.error;
  const words = error?.message ?? `the server answered ${response.status} ${response.statusText}`;
  const isTooLong = response.status === 413 || error?.code === "context_length_exceeded";
  const isFinal = isTooLong || (response.status === 400 && error?.param === "messages"); // such as an image
  return Object.assign(new Error(words), { isFinal, param: error?.param });
}

function askForKey(refused) {
  keyQuestion ??= new Promise((resolve, reject) => {
    const dialog = byId("key-dialog");
    byId("key-trouble").hidden = !refused;
    byId("key").value = dialog.returnValue = "";
    dialog.onclose = () => {
      keyQuestion = null;
      if (dialog.returnValue !== "use") return reject(new KeyWanted("the server wants an API key"));
      keep("sessionStorage", "key", byId("key").value);
      resolve();
    };
    dialog.showModal();
  });
  return keyQuestion;
}

/** The events of a stream, parsed, without its comments. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read().catch(unreachable);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice("data: ".length));
  }
}
