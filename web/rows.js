/** The lists of requests that run and of those that have just finished. */

import { questions } from "./chat.js";
import { selected } from "./memory.js";
import { hueOf } from "./paint.js";
import { byId, duration, element, put, shortened } from "./small.js";
import { explain } from "./story.js";

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
  const question = questions.get(item.id);
  row.classList.toggle("mine", question !== undefined);
  put(name, question ? `“${question}”` : item.id === null ? "another key’s request" : shortened(item.id));
  put(told, facts.filter(Boolean).join(" · "));
}

/** How a list names the adapter that a request has, if it has one. */
const withAdapter = ({ adapter }) => adapter && `with ${adapter}`;

export function fillRequests({ requests, counts }) {
  const samples = new Map(); // met so far of each request, by its key
  const keyOf = ({ key }) => {
    samples.set(key, (samples.get(key) ?? 0) + 1);
    return `${key}.${samples.get(key)}`;
  };
  fill(byId("requests"), requests, keyOf, (row, request) => {
    const { key, state, prompt, computed, output, preemptions } = request;
    const done = computed < prompt ? `${computed} of ${prompt} read` : `${output} out`;
    updateRow(row, request, [withAdapter(request), done, preemptions && `preempted ${preemptions}×`, state]);
    row.style.setProperty("--hue", hueOf(key));
  });
  const words = `${counts.running} running, ${counts.swapped} swapped out, ${counts.waiting} waiting`;
  put(byId("requests-text"), requests.length ? words : "Nothing runs.");
}

export function fillFinished(finished) {
  fill(byId("finished"), finished.toReversed(), ({ serial }) => serial, (row, end) => {
    const { prompt, output, preemptions, e2e } = end;
    const again = preemptions && `preempted ${preemptions}×`;
    updateRow(row, end, [withAdapter(end), `${prompt} in, ${output} out`, again, e2e && duration(e2e)]);
  });
}

for (const list of [byId("requests"), byId("finished")]) {
  const itemOf = ({ target }) => target.closest(".row")?.item;
  list.onclick = (event) => itemOf(event) && explain(itemOf(event).id);
  for (const kind of ["pointerover", "focusin"]) {
    list.addEventListener(kind, (event) => (selected.key = itemOf(event)?.key ?? null));
  }
  for (const kind of ["pointerleave", "focusout"]) list.addEventListener(kind, () => (selected.key = null));
}
