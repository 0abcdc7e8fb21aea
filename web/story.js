/**
 * Where the time of a request went, as /explain/<id> tells it.
 *
 * @typedef {{state: string, seconds: number, waited_for?: Object<string, number>, chunks?: number[],
 *   preempted?: {for: string, by: string, tokens: number}}} Stay   one phase of an answer
 */

import { firstTokenOf } from "./memory.js";
import { ask } from "./server.js";
import { byId, duration, element, plural, put, sentence, shortened, sleep } from "./small.js";

const WAITS = {
  blocks: "free blocks", slots: "a free slot", tokens: "room in a step’s tokens", step: "the step under way to end",
  delay: "the scheduler’s delay", order: "others that had to run first", adapters: "a slot for its adapter",
  trial: "requests on trial, which run alone",
};

/** Tell the story of a request, anew each second while it runs. */
export async function explain(id) {
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

function storyOf(prompt) {
  return prompt.answers.map((answer) => {
    const { state, finish_reason: reason, output_tokens: output, stays, ahead, draft_tokens: drafts } = answer;
    const phases = phasesOf(stays, prompt.answers.length === 1 ? firstTokenOf(prompt.request_id) : null);
    const facts = [
      `${duration(prompt.seconds)} ${prompt.finished ? "in all" : "so far"}`,
      `${plural(prompt.prompt_tokens, "prompt token")}, ${output} out`, reason ? `ended by ${reason}` : state,
      drafts && `took ${answer.accepted_tokens} of ${plural(drafts, "draft")}`,
      prompt.adapter && `with the adapter ${prompt.adapter}`, ahead && `${plural(ahead, "other")} ahead of it`,
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
