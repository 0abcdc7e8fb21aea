/**
 * The tokens of an answer, and what else they might have been.
 *
 * @typedef {{token: string, logprob: number, bytes: number[], top_logprobs: Token[]}} Token   of `logprobs.content`
 */

import { byId, element, hideTip, percent, showTip } from "./small.js";

/** The tokens of an answer as spans. The bytes of a character that several tokens share wait until it is whole. */
export class Tokens {
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

function showChoices(span) {
  showTip(span.getClientRects()[0], ...span.tokens.map(choicesOf));
  span.setAttribute("aria-describedby", "tip");
}

for (const kind of ["pointerover", "focusin"]) {
  byId("messages").addEventListener(kind, ({ target }) => (target.tokens ? showChoices(target) : hideTip()));
}
for (const kind of ["pointerleave", "focusout"]) byId("messages").addEventListener(kind, hideTip);
