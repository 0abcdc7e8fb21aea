/**
 * Markdown as models write it, made into elements: paragraphs, headings, lists, quotes, tables, rules, code, and inside
 * of them code, bold, italics, strikethrough and links.
 *
 * Nothing that a model writes can run: every text is put in as text, and a link leads to http or https alone. Each
 * pattern takes time in proportion to the text: there is one way in which it may match, or it looks no further than a
 * fixed number of characters. `.` goes with the flag s, because lines may have separators of Unicode's in them.
 */

import { copyButton, element } from "./small.js";

const DEEPEST = 8; // lists and quotes within each other; what is deeper is shown as it was written
const FENCE = /^ {0,3}(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/s;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>[ \t]?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|)$/s;
const TABLE_RULE = /^[ \t|:-]+$/; // with a - among them
const INLINE = new RegExp([
  String.raw`\\(?<escaped>[!-/:-@[-\x60{-~])`,
  "(?<!`)(?<ticks>`{1,10})(?!`)(?<code>[^]{1,2000}?)(?<!`)\\k<ticks>(?!`)",
  String.raw`\*\*(?=\S)(?<strong>[^]{1,1000}?)(?<=\S)\*\*(?!\*)`,
  String.raw`(?<!\w)__(?=\S)(?<strong2>[^]{1,1000}?)(?<=\S)__(?!\w)`,
  String.raw`(?<![\w*])\*(?=[^\s*])(?<em>[^]{1,1000}?)(?<=[^\s*])\*(?![\w*])`,
  String.raw`(?<![\w_])_(?=[^\s_])(?<em2>[^]{1,1000}?)(?<=[^\s_])_(?![\w_])`,
  String.raw`~~(?=\S)(?<del>[^]{1,1000}?)(?<=\S)~~`,
  String.raw`!?\[(?<label>[^\[\]]{1,500})\]\((?<href>[^\s()<>]{1,1000}(?:\([^\s()<>]{0,200}\)[^\s()<>]{0,200})?)(?: +"[^"]{0,200}")?\)`,
  String.raw`(?<![\w/])(?<address>https?:\/\/[^\s<>\x60"]{1,1000}[^\s<>\x60".,:;!?'*_)\]])`,
].join("|"), "g");

/** Show a text in `host`. What was there and is still the same stays, so that a text may grow piece by piece. */
export function render(host, text) {
  if (host.source === text) return;
  host.source = text;
  const blocks = blocksOf(text.replace(/\r\n?/g, "\n").split("\n"));
  const sources = blocks.map(({ kind, lines }) => `${kind}\n${lines.join("\n")}`);
  const before = host.sources ?? [];
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same++;
  while (host.childNodes.length > same) host.lastChild.remove();
  for (const block of blocks.slice(same)) host.append(build(block, 0));
  host.sources = sources;
}

// --- blocks ----------------------------------------------------------------------------------------------------------

function kindOf(line, next) {
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line) && ITEM.exec(line)[1].length < 4) return "list";
  const isTable = line.includes("|") && next?.includes("|") && next.includes("-") && TABLE_RULE.test(next);
  return isTable && cellsOf(line).length === cellsOf(next).length ? "table" : "paragraph";
}

/** Cut lines into blocks. @returns {{kind: string, lines: string[]}[]} */
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const kind = kindOf(lines[i], lines[i + 1]);
    const end = ENDS[kind]?.(lines, i) ?? i + 1;
    blocks.push({ kind, lines: lines.slice(i, end) });
    i = end;
  }
  return blocks;
}

/** Where a block of a kind ends that begins at a line; other kinds have one line. */
const ENDS = {
  code(lines, start) {
    const [, fence] = FENCE.exec(lines[start].trimStart());
    const isEnd = (line) => line.trim().length >= fence.length && !line.trim().replaceAll(fence[0], "");
    let end = start + 1;
    while (end < lines.length && !isEnd(lines[end])) end++;
    return Math.min(end + 1, lines.length);
  },
  quote: (lines, start) => endWhere(lines, start, (line) => !QUOTE.test(line)),
  table: (lines, start) => endWhere(lines, start, (line) => !line.includes("|")),
  paragraph(lines, start) {
    return endWhere(lines, start, (line, next) => {
      if (!line.trim()) return true;
      const kind = kindOf(line, next);
      return kind !== "paragraph" && !(kind === "list" && !/^ *([-*+]|1[.)]) +\S/.test(line));
    });
  },
  list(lines, start) {
    const isNumbered = /\d/.test(ITEM.exec(lines[start])[2]);
    let end = start + 1;
    while (end < lines.length) {
      const line = lines[end];
      if (line.startsWith("  ") && FENCE.test(line.trimStart())) end = ENDS.code(lines, end);
      else if (line.startsWith("  ") || !line.trim()) end++;
      else if (ITEM.test(line) && !RULE.test(line) && /\d/.test(ITEM.exec(line)[2]) === isNumbered) end++;
      else if (lines[end - 1].trim() && kindOf(line, lines[end + 1]) === "paragraph") end++;
      else break;
    }
    while (!lines[end - 1].trim()) end--;
    return end;
  },
};

function endWhere(lines, start, isEnd) {
  let end = start + 1;
  while (end < lines.length && !isEnd(lines[end], lines[end + 1])) end++;
  return end;
}

function build({ kind, lines }, depth) {
  if (depth > DEEPEST) return element("p", {}, lines.join("\n"));
  return BUILDERS[kind](lines, depth);
}

const BUILDERS = {
  paragraph: (lines) => element("p", {}, inline(lines.join("\n"), 0)),
  rule: () => element("hr"),
  heading([line]) {
    const [, marks, text] = HEADING.exec(line);
    // The page's own headings come before those of an answer.
    const words = text.trimEnd().replace(/(?<=[ \t])#+$/, "").trimEnd();
    return element(`h${Math.min(6, marks.length + 2)}`, {}, inline(words, 0));
  },
  quote(lines, depth) {
    const inner = lines.map((line) => line.replace(QUOTE, ""));
    return element("blockquote", {}, blocksOf(inner).map((block) => build(block, depth + 1)));
  },
  code: buildCode,
  list: buildList,
  table: buildTable,
};

function buildCode(lines) {
  const indent = /^ */.exec(lines[0])[0].length;
  const [, fence, language] = FENCE.exec(lines[0].trimStart());
  const inner = lines.slice(1).map((line) => line.replace(new RegExp(`^ {0,${indent}}`), ""));
  if (inner.length && inner.at(-1).trim().startsWith(fence) && !inner.at(-1).trim().replaceAll(fence[0], "")) inner.pop();
  const text = inner.join("\n");
  const head = element("div", { className: "code-head" }, element("span", { textContent: language.trim().slice(0, 40) }),
    copyButton(() => text, "Copy code"));
  return element("div", { className: "code" }, head, element("pre", { tabIndex: 0 }, element("code", {}, text)));
}

function buildList(lines, depth) {
  const items = []; // the lines of each
  let width = 0; // of an item's mark, and so the indent of what is inside of it
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && (!items.length || found[1].length < width)) {
      width = found[1].length + found[2].length + 1;
      items.push([found[3] ?? ""]);
    } else {
      items.at(-1).push(line.replace(new RegExp(`^ {0,${width}}`), ""));
    }
  }
  const [, , mark] = ITEM.exec(lines[0]);
  const list = /\d/.test(mark) ? element("ol", { start: parseInt(mark) }) : element("ul");
  for (const item of items) {
    const blocks = blocksOf(item);
    const parts = blocks.map((block, i) => {
      const isPlain = i === 0 && block.kind === "paragraph";
      return isPlain ? inline(block.lines.join("\n"), 0) : [build(block, depth + 1)];
    });
    list.append(element("li", {}, parts.flat()));
  }
  return list;
}

function cellsOf(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function buildTable([head, rule, ...rows]) {
  const sides = cellsOf(rule).map((cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "middle" : "right"));
  const row = (line, tag) => {
    const cells = cellsOf(line).slice(0, sides.length); // a row may have fewer, and is not filled up
    return element("tr", {}, cells.map((cell, i) => element(tag, { className: sides[i] }, inline(cell, 0))));
  };
  const table = element("table", {}, element("thead", {}, row(head, "th")),
    element("tbody", {}, rows.map((line) => row(line, "td"))));
  return element("div", { className: "table", tabIndex: 0 }, table);
}

// --- inside of a line ------------------------------------------------------------------------------------------------

/** The nodes of a text with marks in it. */
function inline(text, depth) {
  if (depth > DEEPEST) return [text];
  const nodes = [];
  let done = 0;
  for (const found of text.matchAll(INLINE)) {
    nodes.push(text.slice(done, found.index), nodeOf(found, depth));
    done = found.index + found[0].length;
  }
  return [...nodes, text.slice(done)].filter((node) => node !== "");
}

function nodeOf({ 0: source, groups }, depth) {
  const { escaped, code, strong, strong2, em, em2, del, label, href, address } = groups;
  if (escaped) return escaped;
  if (code) {
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && /[^ ]/.test(code);
    return element("code", {}, isPadded ? code.slice(1, -1) : code);
  }
  if (strong ?? strong2) return element("strong", {}, inline(strong ?? strong2, depth + 1));
  if (em ?? em2) return element("em", {}, inline(em ?? em2, depth + 1));
  if (del) return element("del", {}, inline(del, depth + 1));
  return linkTo(href ?? address, label ? inline(label, depth + 1) : [address], source);
}

/** A link, or its source where it leads to anything but a page of the web. */
function linkTo(href, content, source) {
  const { protocol } = URL.canParse(href) ? new URL(href) : {};
  if (protocol !== "http:" && protocol !== "https:") return source;
  return element("a", { href, target: "_blank", rel: "noopener noreferrer" }, content);
}
