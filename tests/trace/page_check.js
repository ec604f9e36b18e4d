// Runs in the timeline's page after its own script. It operates the page like a user (pointer, wheel, keys,
// buttons) and writes its findings as JSON to <script id="check"> for the test.
"use strict";
(() => {
const result = {errors: window.pageErrors, problems: [], steps: []};
const problem = text => { if (result.problems.length < 20) result.problems.push(text); };
const canvas = document.getElementById("canvas"), tip = document.getElementById("tip");
const {kinds, runs, steps, choose, boxes, view, drawn} = window.timeline;
const near = (a, b, tolerance) => Math.abs(a - b) <= tolerance;
const whole = () => view()[1] - view()[0];

// Coordinates are in CSS pixels of the canvas.
function point(type, x, y, more = {}) {
  const at = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent(type, {clientX: at.left + x, clientY: at.top + y, button: 0, pointerId: 1,
    bubbles: true, cancelable: true, ...more}));
}
function wheel(x, y, deltaY) {
  const at = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new WheelEvent("wheel", {clientX: at.left + x, clientY: at.top + y, deltaY, bubbles: true, cancelable: true}));
}
function key(name) { document.body.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true, cancelable: true})); }
// Makes a copy, because reading the page's own canvas slows it down.
const copy = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
function photograph() {
  copy.canvas.width = canvas.width;
  copy.canvas.height = canvas.height;
  copy.drawImage(canvas, 0, 0);
}
function pixel(x, y) {
  const ratio = window.devicePixelRatio || 1;
  return Array.from(copy.getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data).slice(0, 3);
}
function colorOf(name) {
  const probe = document.createElement("span");
  probe.style.color = "var(--" + name + ")";
  document.body.append(probe);
  const rgb = getComputedStyle(probe).color.match(/\d+/g).slice(0, 3).map(Number);
  probe.remove();
  return rgb;
}
const tipText = name => {
  const terms = [...tip.querySelectorAll("dt")], at = terms.findIndex(term => term.textContent === name);
  return at < 0 ? null : tip.querySelectorAll("dd")[at].textContent;
};

// Zooms with the wheel until the event is wide enough to point at, and then back.
function checkThin(event) {
  const boxOf = () => boxes().find(box => box.event === event && !box.message);
  for (let i = 0; i < 60 && boxOf().w < 8; i++) { const {x, y, w} = boxOf(); wheel(x + w / 2, y + 3, -150); }
  const {x, y, w} = boxOf();
  point("pointermove", x + w / 2, y + 3);
  const met = !tip.hidden && tip.querySelector("b").textContent.includes(kinds[event.kind] + event.mb) &&
    (event.kind !== 2 || (tipText("layer") ?? "") === event.name);
  point("pointerleave", 0, 0);
  key("0");
  return met;
}

function checkHover() {
  const counts = kinds.map(() => 0);
  photograph();
  for (const {event, message, x, y, w, h} of [...boxes()]) {
    if (!event || (!message && w < 2)) continue;
    const inside = [x + w / 2, message ? y + h / 2 : y + 3];
    point("pointermove", ...inside);
    const title = tip.querySelector("b") ? tip.querySelector("b").textContent : "";
    const expected = event.kind <= 2 ? kinds[event.kind] + event.mb : kinds[event.kind];
    if (tip.hidden || !title.includes(expected)) {
      // Messages a few pixels apart cover each other.
      const covered = message && boxes().some(other => other.message && other.event !== event && near(other.x, x, 12));
      if (!covered) problem("hover over " + expected + " says '" + title + "'");
      continue;
    }
    counts[event.kind]++;
    if (event.kind === 2 && (tipText("layer") ?? "") !== event.name) problem("W's layer: " + tipText("layer"));
    if (event.kind <= 2 && tipText("micro-batch") !== String(event.mb)) problem("micro-batch: " + tipText("micro-batch"));
    if (tipText("run") !== (runs[event.run] || null)) problem("run: " + tipText("run"));
    if (tipText("duration") === null || tipText("start") === null) problem("no times for " + title);
    const box = tip.getBoundingClientRect();
    if (box.left < 0 || box.right > innerWidth + 1) problem("tooltip out of the window for " + title);
    // The bar has the colour of its kind (except at its label, its hover border and its seams).
    if (!message && event.kind <= 3 && w > 12) {
      const seen = pixel(x + 4, y + 4), wanted = colorOf(kinds[event.kind]);
      if (!seen.every((value, i) => near(value, wanted[i], 3))) problem(expected + " is drawn in " + seen + ", not " + wanted);
    }
  }
  for (const kind of [0, 1, 2]) {
    const thin = boxes().filter(box => box.event && box.event.kind === kind && box.w < 2).slice(0, 5).map(box => box.event);
    for (const event of thin) if (checkThin(event)) counts[kind]++; else problem("zoomed in, " + kinds[kind] + event.mb + " is not met");
  }
  const memory = boxes().filter(box => box.memory !== undefined);
  for (const box of memory) {
    point("pointermove", box.x + box.w / 2, box.y + box.h / 2);
    const rank = result.now.ranks[box.memory], name = (runs[rank.run] ? runs[rank.run] + ", " : "") + "rank " + rank.index;
    if (tip.hidden || !tip.textContent.includes("memory of " + name)) problem("no memory tooltip for " + name);
  }
  point("pointerleave", 0, 0);
  if (!tip.hidden) problem("the tooltip stays");
  return {counts, memory: memory.length};
}

// Both runs of a step use one time scale. The predicted one is above, and they move together.
function checkTwoRuns(step) {
  const memory = boxes().find(box => box.memory !== undefined), scale = memory.w / whole();
  const tops = runs.map(() => []);
  for (const box of boxes()) {
    if (!box.event || box.message) continue;
    tops[box.event.run].push(box.y);
    const x = memory.x + (box.event.begin - view()[0]) * scale;
    if (box.event.begin >= view()[0] && !near(box.x, x, 0.5)) problem("an op of the " + runs[box.event.run] + " run is off the time scale");
  }
  if (tops.some(list => list.length === 0)) return problem("a run is not drawn");
  if (runs.length > 1 && !(Math.max(...tops[0]) < Math.min(...tops[1]))) problem("predicted is not above measured");
  if (runs.length > 1 && !document.getElementById("cards").textContent.includes("predicted")) problem("no prediction in the cards");
}

function checkZoom(seconds) {
  const lane = boxes().find(box => box.event && box.event.kind <= 4), [from] = view();
  const left = boxes().find(box => box.memory !== undefined).x, width = boxes().find(box => box.memory !== undefined).w;
  const x = left + width * 0.25, y = lane.y + 5, around = from + whole() * 0.25;
  wheel(x, y, -150);
  if (!(whole() < seconds * 0.99)) problem("the wheel does not zoom in: " + view());
  if (!near(view()[0] + whole() * 0.25, around, seconds * 1e-6)) problem("the wheel moves what is under the pointer");
  const zoomed = whole();
  key("ArrowRight");
  if (!near(whole(), zoomed, seconds * 1e-9) || !(view()[0] > 0)) problem("the arrow key does not move");
  const before = view()[0];
  point("pointerdown", x, y, {shiftKey: true});
  point("pointermove", x + 40, y, {shiftKey: true});
  point("pointerup", x + 40, y, {shiftKey: true});
  if (!(view()[0] < before)) problem("shift-dragging to the right does not move back");
  wheel(x, y, 600);
  key("0");
  if (!near(view()[0], 0, 0) || !near(view()[1], seconds, seconds * 1e-12)) problem("0 does not show the whole step: " + view());
  point("pointerdown", left + width * 0.5, y);
  point("pointermove", left + width * 0.6, y);
  point("pointerup", left + width * 0.6, y);
  if (!near(view()[0], seconds * 0.5, seconds * 1e-3) || !near(view()[1], seconds * 0.6, seconds * 1e-3)) problem("dragging shows " + view());
  const few = drawn();
  document.getElementById("reset").click();
  if (!near(whole(), seconds, seconds * 1e-12)) problem("the button does not reset");
  if (!(few.reduce((a, b) => a + b) < drawn().reduce((a, b) => a + b))) problem("zoomed in, as much is drawn");
  document.getElementById("in").click();
  key("-");
  if (!near(whole(), seconds, seconds * 1e-9)) problem("in and out do not cancel");
  // Everything still draws at the maximum zoom.
  for (let i = 0; i < 60; i++) wheel(x, y, -300);
  if (!(whole() > 0) || !near(whole(), seconds * 1e-5, seconds * 1e-6)) problem("deepest zoom: " + whole());
  key("Escape");
}

try {
  steps.forEach((step, i) => {
    choose(i);
    const all = [...drawn()];
    result.now = step;
    checkTwoRuns(step);
    document.getElementById("in").click();
    checkTwoRuns(step);
    key("0");
    result.steps.push({drawn: all, hover: checkHover(), rows: document.querySelectorAll("#table tbody tr").length});
    checkZoom(step.seconds);
    document.getElementById("messages").click();
    if (drawn()[5] + drawn()[6] !== 0) problem("messages can't be switched off");
    document.getElementById("messages").click();
  });
  choose(0);
  key("]");
  result.second = document.querySelector("#steps [aria-pressed=true]")?.textContent ?? "";
  key("[");
  key("[");
  result.first = document.querySelector("#steps [aria-pressed=true]")?.textContent ?? "";
  result.title = document.getElementById("title").textContent;
  result.broken = document.body.dataset.broken ?? "";
  result.page = getComputedStyle(document.body).backgroundColor;
  result.wider = document.documentElement.scrollWidth - innerWidth;
  result.loaded = performance.getEntriesByType("resource").length;
} catch (error) {
  result.errors.push(String(error.stack));
}
const out = document.createElement("script");
out.type = "application/json";
out.id = "check";
delete result.now;
out.textContent = JSON.stringify(result).replaceAll("<", "\\u003c");
document.body.append(out);
})();
