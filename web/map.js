/** The map of the KV blocks: whose each one is, and a bar for the whole pool. */

import { questions } from "./chat.js";
import { OWNERS, selected } from "./memory.js";
import { clean, hueOf, inks, soon, still } from "./paint.js";
import { byId, plural, put, whole } from "./small.js";

const FLASH = 900; // milliseconds for which a block is seen to move
const mine = new Set(); // keys of this page's own requests

/** How many blocks are free, cached, shared, or of one request. @param {import("./memory.js").Engine} engine */
export function tally(engine) {
  const counts = { free: 0, cached: 0, shared: 0, owned: 0 };
  for (const [owner, length] of engine.blocks) counts[OWNERS[owner] ?? "owned"] += length;
  return counts;
}

export function drawMap({ engine, flashes, cells }, now) {
  for (const { id, key } of engine.requests) if (questions.has(id)) mine.add(key);
  const canvas = byId("blocks");
  const drawn = cells.drawn();
  const side = cellSide(drawn.length, canvas.clientWidth);
  const columns = Math.max(1, Math.floor(canvas.clientWidth / side));
  canvas.style.height = `${Math.ceil(drawn.length / columns) * side}px`;
  const { pen } = clean(canvas);
  const isLit = engine.requests.some(({ key }) => key === selected.key);
  const gap = side >= 12 ? 2 : side >= 4 ? 1 : 0;
  const size = side - gap;
  drawn.forEach(({ owner, key }, i) => {
    const [x, y] = [(i % columns) * side, Math.floor(i / columns) * side];
    pen.fillStyle = inks[OWNERS[owner]] ?? `oklch(0.64 0.12 ${hueOf(owner)})`;
    pen.globalAlpha = isLit && owner !== selected.key ? 0.25 : 1;
    pen.fillRect(x, y, size, size);
    if (!mine.has(key) || owner === 0 || size < 4) return;
    pen.strokeStyle = inks.text;
    pen.lineWidth = owner > 0 ? 2 : 1; // thin where it is only cached, because the request has ended
    pen.strokeRect(x + 1, y + 1, size - 2, size - 2);
  });
  drawFlashes(pen, flashes.filter(({ block }) => cells.cellOf(block) !== null), cells, side, columns, now);
  while (flashes.length && now - flashes[0].begun > FLASH) flashes.shift();
  drawPool(engine);
  put(byId("blocks-text"), mapWords(engine));
  const words = cells.each > 1 ? `The bar is the whole pool. Each cell stands for ${cells.each} blocks.`
    : drawn.length < engine.num_blocks ? "The bar is the whole pool. Each cell is a block that is or was in use." : "";
  put(byId("cells-text"), words);
}

/** The largest side, in CSS pixels, at which so many cells fill no more than a quarter as much height as width. */
function cellSide(count, width) {
  const height = Math.max(width / 4, 150);
  let side = 26;
  while (side > 0.5 && Math.floor(width / side) * Math.floor(height / side) < count) side -= side > 4 ? 1 : 0.5;
  return side;
}

/** Blocks that leave for the host rise and fade; those that come back sink into their place. */
function drawFlashes(pen, flashes, cells, side, columns, now) {
  pen.fillStyle = inks.moved;
  for (const { block, way, begun } of flashes) {
    const part = Math.min(1, Math.max(0, (now - begun) / FLASH));
    const cell = cells.cellOf(block);
    const lift = still.matches ? 0 : Math.max(side, 8) * (way === "out" ? part : 1 - part);
    pen.globalAlpha = still.matches ? 1 : 1 - part;
    const size = Math.max(3, side - 1);
    pen.fillRect((cell % columns) * side, Math.floor(cell / columns) * side - lift, size, size);
  }
  pen.globalAlpha = 1;
  if (flashes.length && !still.matches) soon(drawMap);
}

function drawPool(engine) {
  const counts = tally(engine);
  for (const part of byId("pool").children) part.style.flexGrow = counts[part.dataset.part] / (engine.num_blocks || 1);
  for (const part of byId("pool").children) part.hidden = !counts[part.dataset.part];
}

function mapWords(engine) {
  const { free, cached, shared, owned } = tally(engine);
  const { out, in: back, copies } = engine.moves;
  const words = [
    `${whole.format(owned + shared)} of ${plural(engine.num_blocks, "block")} of ${engine.block_size} tokens in use`,
    `${whole.format(shared)} shared`, `${whole.format(cached)} cached`, `${whole.format(free)} free`,
  ];
  if (engine.num_host_blocks) words.push(`${whole.format(engine.num_host_blocks)} more on the host`);
  if (out + back + copies) words.push(`now moving: ${out} out, ${back} in, ${copies} copied`);
  return words.join(" · ");
}
