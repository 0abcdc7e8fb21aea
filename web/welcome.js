/** What a visitor sees first: which model there is, and for the demo, what it can do and examples to try. */

import { send } from "./chat.js";
import { ask } from "./server.js";
import { offerModels } from "./settings.js";
import { byId, element, put, sentence, whole } from "./small.js";

const DEMO = "This is the demo: a model of 2.6 million parameters, trained from scratch on a few skills. It adds and "
  + "subtracts, spells words backwards, repeats them, remembers what you tell it, writes small JSON objects, and calls "
  + "a calculator. Of anything else it says that it cannot do that.";
const EXAMPLES = [
  { text: "Who are you?" },
  { text: "What is 12 * 34?", note: "with a calculator tool", calculator: true },
  { text: "What is 23 + 58?" },
  { text: "Spell stone backwards." },
  { text: "Repeat harbor 5 times." },
  { text: "My cat is Ada.", next: "What is my cat?" },
  { text: "Give me a person as JSON with name, age and city." },
];

/** The model's name and context, and the examples if it is the demo that is served. */
export async function showModel() {
  try {
    const { data } = await (await ask("v1/models")).json();
    const [{ id, root, max_model_len: longest, input_modalities: modalities }] = data;
    byId("attach").hidden = !(modalities ?? ["image"]).includes("image"); // of several models some may see
    offerModels(data.map((model) => model.id));
    put(byId("model"), longest ? `${id}, ${whole.format(longest)} tokens of context` : `${data.length} models, loaded on demand`);
    document.title = `${id} · Manta`;
    if (root === "demo") showExamples();
  } catch (error) {
    put(byId("model"), sentence(error.message));
  }
}

function showExamples() {
  put(byId("about"), DEMO);
  byId("examples").replaceChildren(...EXAMPLES.map(({ text, note, next, calculator = false }) => {
    const chip = element("button", { type: "button", className: "chip", textContent: text, onclick: () => {
      if (byId("calculator").checked !== calculator) byId("calculator").click(); // so that this is kept, too
      byId("prompt").value = next ?? "";
      send(text);
    } });
    if (note) chip.append(element("span", { className: "soft", textContent: ` ${note}` }));
    return chip;
  }));
}
