/** Small things that the other files of the page share: elements, words for numbers, copying, and the tip. */

export const byId = (id) => document.getElementById(id);
export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A new element. `children` may be lists, which have no limit; a call with very many arguments fails. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  for (const child of children.flat()) made.append(child);
  return made;
}

export function link(text, act) {
  return element("button", { type: "button", className: "link", textContent: text, onclick: act });
}

/** Change an element's text, if it is another one. */
export function put(where, text) {
  if (where.textContent !== text) where.textContent = text;
}

export function plural(count, one) {
  return `${whole.format(count)} ${one}${count === 1 ? "" : "s"}`;
}

export function duration(seconds) {
  if (seconds < 0.0995) return `${(1000 * seconds).toPrecision(2).replace(/\.0$/, "")} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

export function percent(share) {
  if (share > 0 && share < 0.0001) return "< 0.01 %";
  return `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
}

export function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** The first words of a text, on one line. */
export function firstWords(text, most = 40) {
  const line = text.slice(0, 4 * most).replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most).replace(/\s\S*$/, "")} …` : line;
}

/** The first digits of an id like `chatcmpl-1f2e3d4c5b6a...`, which are enough to tell requests apart. */
export function shortened(id) {
  return id.replace(/^[^-]*-([0-9a-f]{8}).*/, "$1");
}

export function sleep(seconds, signal) {
  return new Promise((resolve) => {
    setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", resolve, { once: true });
  });
}

// --- copying ---------------------------------------------------------------------------------------------------------

/** Put a text on the clipboard. Browsers offer `navigator.clipboard` to HTTPS and to this machine alone. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", { value: text, className: "hidden", readOnly: true });
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    if (!isCopied) throw new Error("the browser does not copy");
  }
}

/** A button that copies what `textOf` gives, and says so. */
export function copyButton(textOf, words = "Copy") {
  const button = link(words, async () => {
    put(button, await copy(textOf()).then(() => "Copied", () => "Not copied"));
    button.focus({ preventScroll: true });
    setTimeout(() => put(button, words), 1500);
  });
  return button;
}

/** Have the browser save a text as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// --- the tip ---------------------------------------------------------------------------------------------------------

/** Show the tip beside a rectangle of the window: below it, or above where there is no room. */
export function showTip(at, ...content) {
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const isBelow = at.bottom + height + 12 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  tip.style.top = `${isBelow ? at.bottom + 6 : at.top - height - 6}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}

addEventListener("scroll", hideTip, true);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("tip").hidden) return;
  hideTip();
  event.preventDefault(); // so that this Escape does nothing else
});
