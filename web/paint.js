/** What the drawings share: when they are made, in which colours, and on which canvas. */

import { memories, selected } from "./memory.js";

export const still = matchMedia("(prefers-reduced-motion: reduce)");
export const inks = {}; // the colours of the legends: what is drawn has the colours that they show
const asked = new Set(); // drawings that the next frame has

/** Draw what is known of the engine that is shown, with the next frame. */
export function soon(drawing) {
  if (asked.has(drawing)) return;
  asked.add(drawing);
  requestAnimationFrame((now) => {
    asked.delete(drawing);
    if (memories.has(selected.rank)) drawing(memories.get(selected.rank), now);
  });
}

export function readInks() {
  for (const ink of document.querySelectorAll("[data-ink]")) inks[ink.dataset.ink] = getComputedStyle(ink).backgroundColor;
  const style = getComputedStyle(document.body);
  Object.assign(inks, { text: style.color, font: style.fontFamily });
  const { color, borderTopColor } = getComputedStyle(document.querySelector(".legend"));
  Object.assign(inks, { soft: color, line: borderTopColor });
}

/** A canvas made ready for a drawing in CSS pixels. */
export function clean(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const [across, down] = [width, height].map((side) => Math.round(side * devicePixelRatio));
  if (canvas.width !== across) canvas.width = across;
  if (canvas.height !== down) canvas.height = down;
  const pen = canvas.getContext("2d");
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

export function hueOf(key) {
  return (key * 137.508) % 360; // by the golden angle, so that keys that are near have hues that are not
}
