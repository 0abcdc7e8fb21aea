/** The plots: steps and latencies as bars, rates as lines, with axes, and values where the pointer is. */

import { MOST_FINISHED, MOST_STEPS, SPAN } from "./memory.js";
import { clean, inks } from "./paint.js";
import { byId, duration, element, hideTip, percent, plural, put, showTip, whole } from "./small.js";

const [LEFT, ABOVE, BELOW] = [48, 10, 18]; // CSS pixels around a plot, for its scale, for marks, and for its axis
const FEWEST_BARS = 24;
const FEWEST_SECONDS = 10;

const spots = new Map(); // id of a plot: [{x, words}], what the tip says where

/** The next of 1, 2, 5, 10, 20, ... that is no less. */
function roundTop(most) {
  const unit = 10 ** Math.floor(Math.log10(most || 1));
  return unit * [1, 2, 5, 10].find((factor) => factor * unit >= most * 0.9999);
}

/** A plot's frame: lines at 0, half and top, with their values, and words at both ends of the axis. */
function frame(id, top, name, ends) {
  const { pen, width, height } = clean(byId(id));
  const box = { x: LEFT, y: ABOVE, width: width - LEFT, height: height - ABOVE - BELOW };
  pen.font = `11px ${inks.font}`;
  pen.fillStyle = inks.soft;
  pen.strokeStyle = inks.line;
  pen.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(box.y + (1 - part) * box.height) + 0.5;
    pen.beginPath();
    pen.moveTo(box.x, y);
    pen.lineTo(width, y);
    pen.stroke();
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(name(part * top), LEFT - 6, y);
  }
  pen.textBaseline = "bottom";
  pen.textAlign = "left";
  pen.fillText(ends[0], box.x, height);
  pen.textAlign = "right";
  pen.fillText(ends[1], width, height);
  return { pen, box };
}

/** Bars of two parts, the latest last. @param {{parts: number[], mark?: boolean, words: string}[]} bars */
function drawBars(id, bars, most, names, name, unit) {
  const count = Math.min(most, Math.max(FEWEST_BARS, bars.length));
  const top = roundTop(Math.max(0, ...bars.map(({ parts: [lower, upper] }) => lower + upper)));
  const { pen, box } = frame(id, top, name, [`${count} ${unit}s ago`, `latest ${unit}`]);
  const step = box.width / count;
  const places = bars.map(({ parts, mark, words }, i) => {
    const x = box.x + (count - bars.length + i) * step;
    let y = box.y + box.height;
    parts.forEach((part, which) => {
      const tall = part && Math.max(1.5, (part / top) * box.height);
      pen.fillStyle = inks[names[which]];
      pen.fillRect(x, (y -= tall), Math.max(1, step - (step > 3 ? 1 : 0)), tall);
    });
    pen.fillStyle = inks.preempted;
    if (mark) pen.fill(new Path2D(`M${x + step / 2} ${y - 2}l-4-6h8z`));
    return { x: x + step / 2, words };
  });
  spots.set(id, places);
}

export function drawSteps(steps) {
  const wordsOf = ({ step, prefill, decode, preempted, ms }) => {
    const lost = preempted ? `, ${preempted} preempted` : "";
    return `Step ${whole.format(step)}: ${whole.format(decode)} decoding, ${plural(prefill, "prompt token")}${lost}, `
      + duration(ms / 1000);
  };
  const bars = steps.map((step) => (
    { parts: [step.decode, step.prefill], mark: step.preempted > 0, words: wordsOf(step) }
  ));
  drawBars("steps", bars, MOST_STEPS, ["decode", "prefill"], shortNumber, "step");
  put(byId("steps-text"), steps.length ? wordsOf(steps.at(-1)) : "No step has run yet.");
}

export function drawLatency(finished) {
  const timed = finished.filter(({ ttft, e2e }) => ttft !== null && e2e !== null);
  const bars = timed.map(({ ttft, e2e, prompt, output }) => ({
    parts: [ttft, e2e - ttft],
    words: `First token ${duration(ttft)}, end ${duration(e2e)}, ${prompt} in, ${output} out`,
  }));
  drawBars("latency", bars, MOST_FINISHED, ["first", "rest"], (s) => (s ? duration(s) : "0"), "request");
  if (!timed.length) return put(byId("latency-text"), "No request has finished yet.");
  const median = (name) => duration(timed.map((end) => end[name]).sort((a, b) => a - b)[Math.floor(timed.length / 2)]);
  put(byId("latency-text"), `Median of the last ${timed.length}: first token ${median("ttft")}, end ${median("e2e")}`);
}

export function drawRates(rates) {
  const { generated, prompt, hits } = rates.at(-1);
  const rateWords = (rate) => `${whole.format(rate.generated)} generated and ${whole.format(rate.prompt)} prompt tokens a second`;
  const most = Math.max(...rates.map((rate) => rate.generated));
  drawLine("throughput", rates, "generated", roundTop(Math.max(most, 1)), shortNumber, rateWords);
  drawLine("prefix", rates, "hits", 1, (share) => `${whole.format(100 * share)} %`, (rate) => `${percent(rate.hits)} found`);
  put(byId("throughput-text"), rateWords({ generated, prompt }));
  put(byId("prefix-text"), `${percent(hits)} of prompt tokens were found in the cache since the start`);
}

function drawLine(id, rates, name, top, label, wordsOf) {
  const end = rates.at(-1).time;
  const span = Math.min(SPAN, Math.max(FEWEST_SECONDS, Math.ceil(end - rates[0].time)));
  const { pen, box } = frame(id, top, label, [`${span} s ago`, "now"]);
  const bottom = box.y + box.height;
  const places = rates.map((rate) => ({
    x: box.x + box.width * Math.max(0, 1 - (end - rate.time) / span),
    y: bottom - (rate[name] / top) * box.height,
    words: `${whole.format(end - rate.time)} s ago: ${wordsOf(rate)}`,
  }));
  pen.beginPath();
  for (const { x, y } of places) pen.lineTo(x, y);
  pen.strokeStyle = pen.fillStyle = inks.decode;
  pen.lineWidth = 1.5;
  pen.stroke();
  pen.lineTo(box.x + box.width, bottom);
  pen.lineTo(places[0].x, bottom);
  pen.globalAlpha = 0.15;
  pen.fill();
  pen.globalAlpha = 1;
  spots.set(id, places);
}

/** A number that fits beside a scale: 1,500 is 1.5k. */
function shortNumber(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  return value >= 1e3 ? `${+(value / 1e3).toPrecision(3)}k` : String(+value.toPrecision(3));
}

for (const canvas of document.querySelectorAll("canvas.plot")) {
  canvas.onpointermove = ({ offsetX, clientX }) => {
    const places = spots.get(canvas.id) ?? [];
    if (!places.length) return;
    const gap = ({ x }) => Math.abs(x - offsetX);
    const nearest = places.reduce((best, place) => (gap(place) < gap(best) ? place : best));
    const { top } = canvas.getBoundingClientRect();
    const left = clientX - offsetX + nearest.x;
    showTip({ left, top, bottom: top + canvas.clientHeight }, element("div", { textContent: nearest.words }));
  };
  canvas.onpointerleave = hideTip;
}
