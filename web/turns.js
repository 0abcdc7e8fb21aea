/**
 * How a turn of a chat looks: a message of the user's, which can be edited in its place, or an answer with its rounds.
 * In each round a model may write for itself, write text, and call tools.
 */

import { copyButton, element, link, put } from "./small.js";
import { render } from "./markdown.js";
import { picture } from "./pictures.js";
import { Tokens } from "./tokens.js";
import { wordsOf } from "./tools.js";

/** The text of a turn, as it is copied and exported. @param {import("./storage.js").Turn} turn */
export function textOf(turn) {
  return turn.role === "user" ? turn.content : turn.rounds.map(({ content }) => content).filter(Boolean).join("\n\n");
}

/** One turn on the page. `actions` is the line below it, which the chat fills. */
class TurnView {
  constructor(role) {
    this.body = element("div", { className: "body" });
    this.actions = element("div", { className: "actions" });
    const speaker = element("span", { className: "hidden", textContent: role === "user" ? "You:" : "The model:" });
    this.item = element("li", { className: `message ${role}` }, speaker, this.body, this.actions);
  }
}

export class UserView extends TurnView {
  constructor({ content, pictures = [] }) {
    super("user");
    this.text = element("div", { className: "text", textContent: content });
    this.body.append(this.text, ...pictures.map(picture));
  }

  /** Edit the text in its place. `send` gets the new one, and says whether it took it. */
  edit(content, send) {
    if (this.editor) return this.editor.firstChild.focus();
    const field = element("textarea", { value: content, ariaLabel: "Edit your message" });
    const close = () => {
      this.editor.remove();
      this.editor = null;
      this.item.classList.remove("editing");
    };
    const take = () => field.value.trim() && send(field.value.trim()) && close();
    field.onkeydown = (event) => {
      if (event.isComposing || !(event.key === "Escape" || (event.key === "Enter" && !event.shiftKey))) return;
      event.preventDefault();
      if (event.key === "Enter") return take();
      close();
      this.actions.querySelector("button")?.focus();
    };
    const done = element("button", { type: "button", className: "main", textContent: "Send", onclick: take });
    const cancel = element("button", { type: "button", className: "quiet", textContent: "Cancel", onclick: close });
    this.editor = element("div", { className: "editor" }, field, element("div", { className: "buttons" }, cancel, done));
    this.item.classList.add("editing");
    this.body.append(this.editor);
    field.focus();
  }
}

export class AnswerView extends TurnView {
  /** @param {boolean} hasTokens  whether the tokens come one by one, with what else they might have been */
  constructor(turn, hasTokens = false) {
    super("assistant");
    this.hasTokens = hasTokens;
    this.rounds = [];
    turn.rounds.forEach((round) => this.draw(this.begin(), round));
  }

  /** A round that begins. */
  begin() {
    const summary = element("summary", { textContent: "Reasoning" });
    const reasoning = element("div", { className: "reasoning-text" });
    const thought = element("details", { className: "reasoning", hidden: true }, summary, reasoning);
    const [text, calls] = [element("div", { className: "text" }), element("ul", { className: "calls", hidden: true })];
    const box = element("div", { className: "round" }, thought, text, calls);
    const view = { box, thought, summary, reasoning, text, calls, tokens: this.hasTokens ? new Tokens(text) : null };
    this.rounds.push(view);
    this.body.append(box);
    return view;
  }

  /** @param {import("./storage.js").Round} round */
  draw(view, round) {
    view.thought.hidden = !round.reasoning;
    if (round.reasoning) render(view.reasoning, round.reasoning);
    put(view.summary, round.content || round.calls.length ? "Reasoning" : "Reasoning …");
    if (!view.tokens) {
      render(view.text, round.content);
      view.text.hidden = !round.content && (round.reasoning !== "" || round.calls.length > 0);
    }
    view.calls.hidden = !round.calls.length;
    view.calls.replaceChildren(...round.calls.map((call) => element("li", { className: "call", textContent: wordsOf(call) })));
  }
}

/** Arrows between the versions of a turn, where there are several. @param {{count: number, at: number}} versions */
export function arrows({ count, at }, go) {
  if (count < 2) return [];
  const arrow = (text, ariaLabel, way) => Object.assign(link(text, () => go(at + way)), {
    ariaLabel, disabled: at + way < 0 || at + way >= count,
  });
  const place = element("span", { className: "soft", textContent: `${at + 1} / ${count}` });
  return [element("span", { className: "versions" }, arrow("‹", "Previous version", -1), place,
    arrow("›", "Next version", 1))];
}

export function copyTurn(turn) {
  return copyButton(() => textOf(turn));
}

/** A chat as Markdown. @param {import("./storage.js").Turn[]} turns */
export function asMarkdown(turns) {
  const parts = turns.map((turn) => {
    const calls = (turn.rounds ?? []).flatMap((round) => round.calls).map((call) => `> ${wordsOf(call)}\n\n`);
    return `## ${turn.role === "user" ? "You" : "The model"}\n\n${calls.join("")}${textOf(turn)}\n`;
  });
  return parts.join("\n");
}
