/**
 * What the page does to a model's text, on texts over which a pattern may take long: node page_patterns.mjs FOLDER,
 * a copy of web/ as ES modules. It prints JSON: what took more of this process's own time than anything linear does, how
 * many patterns there are, and the most that a whole text took.
 *
 * A pattern of quadratic time takes half a second or more for SIZE characters, and a linear one less than a millisecond.
 */

import { readdirSync, readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const SIZE = 40_000;
const LIMIT = 0.25; // seconds for a pattern
const LIMIT_OF_TEXT = 5; // seconds for a text, whose marks are looked for up to 2,000 characters ahead, from every place
const folder = process.argv[2];

// --- as much of a browser as markdown.js asks for ---------------------------------------------------------------------

class Node {
  childNodes = [];
  append(...nodes) {
    for (const node of nodes) this.childNodes.push(node instanceof Node ? Object.assign(node, { parent: this }) : node);
  }
  get lastChild() {
    return { remove: () => this.childNodes.pop() };
  }
  toJSON() {
    return [this.tag, this.className, this.childNodes];
  }
}
globalThis.document = { createElement: (tag) => Object.assign(new Node(), { tag }), getElementById: () => null };
globalThis.addEventListener = () => {};
const { render } = await import(pathToFileURL(`${folder}/markdown.js`));

function seconds(act) {
  const begun = process.cpuUsage();
  act();
  const { user, system } = process.cpuUsage(begun);
  return (user + system) / 1e6;
}

// --- every pattern ----------------------------------------------------------------------------------------------------

function patternsOf(source) {
  const code = source.replace(/\/\*[^]*?\*\/|^\s*\/\/.*$/gm, "");
  const literals = code.matchAll(/(?<=[(,=!?:&|]\s*|return\s)\/((?:[^/\\[\n*]|\\.|\[(?:[^\]\\\n]|\\.)*\])(?:[^/\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])*)\/([dgimsuvy]*)/g);
  return [...literals].map(([, pattern, flags]) => new RegExp(pattern, flags));
}

function* textsFor({ source }) {
  const alphabet = [...new Set([..." a1-", ...source.replace(/\\[a-z]/g, "").replace(/[\\^$()?+{},]/g, "")])];
  for (const begin of ["", ...alphabet, ...alphabet.map((char) => `${char} `)]) {
    for (const part of [...alphabet, "a ", "- ", "\t "]) {
      for (const end of ["", "\u2028", "`x"]) yield begin + part.repeat(SIZE / part.length) + end;
    }
  }
}

const slow = [];
const sources = readdirSync(folder).filter((name) => name.endsWith(".js")).map((name) => readFileSync(`${folder}/${name}`, "utf8"));
const patterns = sources.flatMap(patternsOf);
for (const pattern of patterns) {
  for (const text of textsFor(pattern)) {
    if (seconds(() => text.replace(pattern, "")) < LIMIT) continue;
    slow.push(`${pattern} on ${JSON.stringify(text.slice(0, 8))}`);
    break;
  }
}

// --- whole texts ------------------------------------------------------------------------------------------------------

const PARTS = [
  "*a ", "_a ", "**a ", "__a ", "~~a ", "*", "_", "~", "`", "[", "[a](", "![a](b ", "[a](b (", ">", "> ", "|a", "- ", "-",
  "`` ` ", "  - x\n", "- x\n", "1. x\n", "~~~ ", "https://a", "https://.", "\\", "|\n", "a|\n", "# ", "#", " ", "\n", "\t",
  "- - ", "a\n2. ", "```\n", " ", "` a",
];
const FRAMES = [ // what comes before and after
  ["", ""], ["", "\n|-|"], ["a|b\n|", "x"], ["# a", "b"], ["# ", "#x"], ["- ", "\u2028"], ["~~~", "`"], ["` ", "a`"],
  ["|a".repeat(2000) + "\n" + "|-".repeat(2000) + "\n", ""],
];
let most = 0;
for (const part of PARTS) {
  for (const [begin, end] of FRAMES) {
    const text = begin + part.repeat(SIZE / 2 / part.length) + end;
    const took = seconds(() => render(new Node(), text));
    most = Math.max(most, took);
    if (took > LIMIT_OF_TEXT) slow.push(`a text of ${JSON.stringify(part)} after ${JSON.stringify(begin.slice(0, 8))}`);
  }
}
console.log(JSON.stringify({ slow, patterns: patterns.length, most }));
