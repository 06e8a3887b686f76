"use strict";
// The page is complete without this script. It adds a theme switch, values under the pointer,
// stepping through the pipeline and the timeline, which can be zoomed. Text goes in as text only.

const root = document.documentElement;
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function add(box, name, properties, text = "") {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) element.setAttribute(key, value);
  element.textContent = text;
  box.append(element);
  return element;
}

function addControls(box, buttons, hint) {
  const controls = add(box, "div", { class: "controls" });
  for (const [name, sign, label] of buttons) {
    if (label) add(controls, "button", { type: "button", class: name, "aria-label": label, title: label }, sign);
    else add(controls, "span", { class: name, role: "status" });
  }
  add(controls, "span", { class: "hint" }, hint);
  return controls;
}

function dataOf(box) {
  return JSON.parse(box.querySelector('script[type="application/json"]').textContent);
}

// Theme: the system's choice until somebody presses the button.
const themeButton = document.getElementById("theme");
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const repaints = [];

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches;
}

function showTheme() {
  themeButton.textContent = isDark() ? "Light" : "Dark";
  themeButton.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  for (const repaint of repaints) repaint();
}

themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
systemDark.addEventListener("change", showTheme);

// Numbers as people read them.
function figure(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e12)) return value.toExponential(2);
  return (size >= 1000 ? Math.round(value) : Number(value.toPrecision(3))).toLocaleString("en", { maximumFractionDigits: 12 });
}

function say(value, unit) {
  if (unit === "%") return (100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0) + "\u00a0%";
  return figure(value) + (unit ? "\u00a0" + unit : "");
}

function ticks(low, high, log, about = 4) {
  const found = [];
  if (log) {
    for (let power = Math.ceil(Math.log2(low)); power <= Math.log2(high); power++) found.push(2 ** power);
    return found.filter((_, i) => i % (1 + (found.length >> 3)) === 0);
  }
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 2.5, 5, 10].map((u) => u * power).find((u) => u >= rough * 0.999);
  for (let k = Math.ceil(low / unit - 1e-9); k <= high / unit + 1e-9; k++) found.push(k * unit);
  return found;
}

// The lowest and highest value drawn, and the peak that is cut off so that the rest can be seen.
// A loss may fall from high up in its first steps: that is not a peak.
function rangeOf(points, zero) {
  const means = points.map((p) => p[1]), peak = points.reduce((a, b) => (b[3] > a[3] ? b : a));
  const begin = means.slice(0, means.length / 10 + 1).sort((a, b) => a - b);
  const usual = Math.max(begin[begin.length >> 1], [...means].sort((a, b) => a - b)[Math.floor((means.length - 1) * 0.97)]);
  let low = Math.min(...points.map((p) => p[2])), high = peak[3], cut = null;
  if (high > usual + 3 * Math.max(usual - low, Math.abs(usual) * 1e-3) && points.length > 20) {
    high = Math.max(usual + 0.5 * (usual - low), usual * 1.1);
    cut = peak;
  }
  if (zero) low = Math.min(0, low);
  if (high <= low) {
    const margin = Math.abs(low) * 0.1 || 1;
    if (!zero) low -= margin;
    high += margin;
  }
  return [low, high, cut];
}

// Charts: curves with bands, drawn once; the points nearby under the pointer or by arrow keys.
const NEAR = 40, TOP = 12, RIGHT = 12, BOTTOM = 34;

function drawChart(box) {
  const { title, curves, x: xLabel = "step", unit = "", zero = false, log = false, marks = null, size = [360, 212] } = dataOf(box);
  const [width, height] = size, floor = height - BOTTOM;
  const every = curves.flatMap((curve) => curve.points);
  let [low, high, cut] = rangeOf(every, zero);
  if (unit === "%" && high <= 1 && high > 0.75) high = 1;
  const yMarks = ticks(low, high, log), labels = yMarks.map((mark) => (mark ? say(mark, unit) : "0"));
  const left = Math.max(46, 8 + 6.4 * Math.max(...labels.map((each) => each.length)));
  low = Math.min(low, yMarks[0]);
  high = Math.max(high, yMarks[yMarks.length - 1]);
  const first = Math.min(...every.map((p) => p[0])), last = Math.max(...every.map((p) => p[0]));
  const scale = (a, b, from, to) => (value) => {
    const of = log ? Math.log2 : Number, share = b > a ? (of(value) - of(a)) / (of(b) - of(a)) : 0.5;
    return Math.round(10 * (from + share * (to - from))) / 10;
  };
  const x = scale(first, last, left, width - RIGHT), y = scale(low, high, floor, TOP);
  const said = box.querySelector(".said");
  const picture = make("svg", { viewBox: "0 0 " + size.join(" "), class: "chart", role: "img", "aria-label": title + ". " + said.textContent });
  const put = (name, attributes, text) => picture.appendChild(make(name, attributes, text));
  yMarks.forEach((mark, i) => {
    put("line", { x1: left, x2: width - RIGHT, y1: y(mark), y2: y(mark), class: "grid" });
    put("text", { x: left - 6, y: y(mark) + 4, class: "tick end" }, labels[i]);
  });
  let reached = -Infinity;
  for (const mark of marks || ticks(first, Math.max(last, first + 1)).filter(Number.isInteger)) {
    if (mark > last || x(mark) - reached < 26) continue;
    reached = x(mark);
    put("text", { x: reached, y: height - 18, class: "tick middle" }, figure(mark));
  }
  put("text", { x: (left + width - RIGHT) / 2, y: height - 3, class: "tick middle" }, xLabel);
  const path = (pairs) => "M" + pairs.map((pair) => pair.join(" ")).join("L");
  const capped = (value) => Math.max(TOP - 2, y(value));
  for (const { look, label, points, dots, named } of curves) {
    const group = picture.appendChild(make("g", { class: look }));
    const draw = (name, attributes, text) => group.appendChild(make(name, attributes, text));
    const middle = points.map((p) => [x(p[0]), capped(p[1])]);
    if (points.some((p) => p[3] > p[2])) {
      const lower = [...points].reverse().map((p) => [x(p[0]), y(p[2])]);
      draw("path", { d: path([...points.map((p) => [x(p[0]), capped(p[3])]), ...lower]) + "z", class: "band fill" });
    }
    if (middle.length > 1) draw("path", { d: path(middle), class: "line stroke" });
    if (dots || middle.length === 1) middle.forEach(([cx, cy]) => draw("circle", { cx, cy, r: 3, class: "dot fill" }));
    const [endX, endY] = middle[middle.length - 1];
    if (named) draw("text", { x: endX + 4, y: endY + 20, class: "tick end" }, label);
  }
  if (cut) {
    put("path", { d: "M" + x(cut[0]) + " " + (TOP - 9) + "l4 7h-8z", class: "cut" });
    add(box, "p", { class: "note" }, "A peak of " + say(cut[3], unit) + " near " + xLabel + " " + figure(Math.round(cut[0])) + " is cut off, so that the rest can be seen.");
  }
  const lines = curves.map(({ look, label, points }) => ({
    look, label, points: points.map((p) => [x(p[0]), capped(p[1]), Math.round(p[0]), say(p[1], unit)]),
  }));
  box.insertBefore(picture, said);
  setUpChart(box, picture, put("g", { class: "crosshair" }), xLabel, [width, TOP, floor], lines);
}

function setUpChart(box, picture, cross, unit, frame, lines) {
  const main = lines.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points;
  const tip = add(box, "div", { class: "tip", role: "status" });
  tip.hidden = true;
  let at = main.length - 1;

  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    return x - points[low][0] < points[high][0] - x ? low : high;
  }

  function show(index) {
    at = Math.max(0, Math.min(main.length - 1, index));
    const [x, , step] = main[at];
    cross.replaceChildren(make("line", { x1: x, x2: x, y1: frame[1], y2: frame[2], class: "cross" }));
    const said = [];
    for (const line of lines) {
      const point = line.points[nearest(line.points, x)];
      if (Math.abs(point[0] - x) > NEAR) continue;
      cross.append(make("circle", { cx: point[0], cy: point[1], r: 4, class: "dot fill " + line.look }));
      said.push(lines.length > 1 ? line.label + " " + point[3] : point[3]);
    }
    tip.textContent = unit + " " + step.toLocaleString("en") + ": " + said.join(", ");
    tip.hidden = false;
    const place = picture.getBoundingClientRect(), around = box.getBoundingClientRect();
    const left = place.left - around.left + x * place.width / frame[0] - tip.offsetWidth / 2;
    tip.style.left = Math.max(0, Math.min(around.width - tip.offsetWidth, left)) + "px";
    tip.style.top = place.top - around.top - tip.offsetHeight + 8 + "px";
  }

  function hide() {
    cross.replaceChildren();
    tip.hidden = true;
  }

  picture.setAttribute("tabindex", "0");
  picture.addEventListener("pointermove", (event) => {
    const place = picture.getBoundingClientRect();
    show(nearest(main, (event.clientX - place.left) * frame[0] / place.width));
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const big = Math.max(1, Math.round(main.length / 20));
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - big, PageDown: at + big, Home: 0, End: main.length - 1 };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

// Pipeline: lines from each box of a row to each of the next; between equal columns straight down.
const WIDTH = 400;

function joinBoxes(stages) {
  const rows = stages.map((stage) => [...stage.querySelectorAll(".box")]);
  const lookOf = (box) => [...box.classList].find((name) => name.startsWith("look-"));
  const middle = (index, row) => (index + 0.5) / row.length * WIDTH;
  const layer = (name, height) => make("svg", { class: name, viewBox: "0 0 " + WIDTH + " " + height, preserveAspectRatio: "none", "aria-hidden": "true" });
  rows.slice(0, -1).forEach((row, n) => {
    const rest = layer("rest", 10), joins = layer("joins", 26), next = rows[n + 1];
    row.forEach((above, i) => {
      const a = middle(i, row);
      rest.append(make("path", { d: "M" + a + " 0V10", class: "join stroke " + lookOf(above) }));
      next.forEach((below, j) => {
        if (row.length === next.length && i !== j) return;
        const b = middle(j, next), isShared = ["look-all", "look-more"].includes(lookOf(above));
        const group = make("g", { class: lookOf(isShared ? below : above) });
        group.append(make("path", { d: "M" + a + " 0C" + a + " 13 " + b + " 13 " + b + " 21", class: "join stroke" }));
        group.append(make("path", { d: "M" + b + " 26l-4 -7h8z", class: "fill" }));
        joins.append(group);
      });
    });
    stages[n].querySelector(".stage-picture").append(rest);
    stages[n + 1].querySelector(".stage-picture").prepend(joins);
  });
}

// One stage at a time; the others stay visible without their details.
function setUpStepper(stepper) {
  const stages = [...stepper.querySelectorAll(".stage")];
  joinBoxes(stages);
  if (stages.length < 2) return;
  const buttons = [["back", "◀", "Back"], ["place"], ["next", "▶", "Next"], ["all", "All stages", "Show all"]];
  const controls = addControls(stepper, buttons, "or use the arrow keys");
  stepper.prepend(controls);
  const [back, place, next, all] = controls.children;
  let now = 0;

  function show(index, move) {
    now = Math.max(0, Math.min(stages.length - 1, index));
    stages.forEach((stage, i) => {
      stage.classList.toggle("now", i === now);
      stage.classList.toggle("later", i > now);
      if (i === now) stage.setAttribute("aria-current", "step");
      else stage.removeAttribute("aria-current");
    });
    back.disabled = now === 0;
    next.disabled = now === stages.length - 1;
    place.textContent = "Stage " + (now + 1) + " of " + stages.length;
    if (move) stages[now].scrollIntoView({ block: "nearest" });
  }

  stepper.classList.add("stepping");
  back.addEventListener("click", () => show(now - 1, true));
  next.addEventListener("click", () => show(now + 1, true));
  all.addEventListener("click", () => {
    const everything = stepper.classList.toggle("stepping");
    all.setAttribute("aria-pressed", String(!everything));
  });
  stages.forEach((stage, i) => stage.addEventListener("click", () => {
    if (i !== now && !String(getSelection())) show(i, false);
  }));
  stepper.addEventListener("keydown", (event) => {
    if (event.target.closest(".scroll") || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: now - 1, ArrowUp: now - 1, ArrowRight: now + 1, ArrowDown: now + 1, Home: 0, End: stages.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key], true);
  });
  show(0, false);
}

// Timeline: the spans of the window on a canvas.
const ZOOMS = [["out", "\u2212", "Zoom out"], ["in", "+", "Zoom in"], ["left", "◀", "Earlier"], ["right", "▶", "Later"], ["all", "All", "Show the whole window"]];

function setUpTimeline(box) {
  const { length, names, phases, ranks } = dataOf(box);
  const controls = addControls(box, ZOOMS, "drag, or use arrow keys, + and -");
  const label = "Timeline: arrow keys move, plus and minus zoom";
  const holder = add(box, "div", { class: "canvas-place", tabindex: 0, role: "application", "aria-label": label });
  const readout = add(box, "p", { class: "readout", role: "status" });
  const canvas = add(holder, "canvas", {});
  const pen = canvas.getContext("2d");
  const ROW = 18, GAP = 10, TOP = 22, LABEL = 84;
  const rows = [];
  let height = TOP;
  for (const each of ranks) {
    rows.push(height);
    height += each.lanes.length * ROW + GAP;
  }
  let begin = 0, end = length * Math.min(1, 3.2 / 10), width = 0, colours = {}, queued = false, under = null;

  function readColours() {
    const probe = document.createElement("i");
    holder.append(probe);
    for (const key of ["card", "ink", "muted", "rule", ...phases]) {
      probe.style.color = "var(--" + key + ")";
      colours[key] = getComputedStyle(probe).color;
    }
    probe.remove();
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const t = tile.getContext("2d");
    t.globalAlpha = 0.22;
    t.fillStyle = colours.wait;
    t.fillRect(0, 0, 8, 8);
    t.globalAlpha = 1;
    t.strokeStyle = colours.wait;
    t.lineWidth = 2;
    t.beginPath();
    for (const shift of [-8, 0, 8]) { t.moveTo(shift, 8); t.lineTo(shift + 8, 0); }
    t.stroke();
    colours.hatch = pen.createPattern(tile, "repeat");
  }

  function xOf(time) { return LABEL + (time - begin) / (end - begin) * (width - LABEL - 6); }

  function sayTime(us) {
    if (us < 1e-6) return "0";
    if (us >= 1e6) return +(us / 1e6).toPrecision(3) + " s";
    return us >= 1000 ? +(us / 1000).toPrecision(3) + " ms" : +us.toPrecision(3) + " µs";
  }

  function paint() {
    queued = false;
    const ratio = devicePixelRatio || 1;
    width = holder.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = colours.card;
    pen.fillRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    paintAxis();
    ranks.forEach((each, index) => {
      const top = rows[index];
      pen.fillStyle = colours.ink;
      pen.fillText("worker " + each.rank, 6, top + ROW / 2);
      pen.fillStyle = colours.muted;
      each.lanes.forEach((lane, i) => i && pen.fillText(lane, 6, top + (i + 0.5) * ROW));
    });
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, 0, width - LABEL, height);
    pen.clip();
    ranks.forEach((each, index) => each.spans.forEach((span) => paintSpan(span, rows[index])));
    pen.restore();
  }

  function paintAxis() {
    const rough = (end - begin) / Math.max(2, width / 130);
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map((u) => u * power).find((u) => u >= rough);
    pen.textAlign = "center";
    for (let mark = Math.ceil(begin / unit) * unit; mark <= end; mark += unit) {
      const x = Math.round(xOf(mark)) + 0.5;
      if (x < LABEL + 12) continue;
      pen.fillStyle = colours.rule;
      pen.fillRect(x, TOP - 5, 1, height);
      pen.fillStyle = colours.muted;
      pen.fillText(sayTime(mark), x, 9);
    }
    pen.textAlign = "left";
  }

  function paintSpan([name, lane, start, long], top) {
    const x = xOf(start), y = top + lane * ROW + 1;
    if (x > width || xOf(start + long) < LABEL) return;
    if (long === 0) {
      pen.fillStyle = colours.ink;
      pen.fillRect(x, y + 1, 1.5, ROW - 4);
      return;
    }
    const wide = Math.max(0.7, xOf(start + long) - x - 0.5);
    const word = names[name];
    pen.fillStyle = word === "wait" ? colours.hatch : colours[word] || colours.other;
    pen.fillRect(x, y, wide, ROW - 3);
    if (wide > 7 * word.length && word !== "wait") {
      pen.fillStyle = colours.card;
      pen.fillText(word, Math.max(x, LABEL) + 4, y + ROW / 2 - 1);
    }
  }

  function queue() {
    if (!queued) { queued = true; requestAnimationFrame(paint); }
  }

  function look(from, to) {
    const span = Math.max(length / 5000, Math.min(length, to - from));
    begin = Math.max(0, Math.min(length - span, from));
    end = begin + span;
    queue();
    if (!under) readout.textContent = "Shown: " + sayTime(begin) + " to " + sayTime(end) + " of " + sayTime(length) + ".";
  }

  function zoom(factor, centre = (begin + end) / 2) {
    look(centre - (centre - begin) * factor, centre + (end - centre) * factor);
  }

  function pan(share) { look(begin + share * (end - begin), end + share * (end - begin)); }

  const doing = { in: () => zoom(0.6), out: () => zoom(1 / 0.6), left: () => pan(-0.3), right: () => pan(0.3), all: () => look(0, length) };
  controls.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) doing[button.className]();
  });
  const keys = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", 0: "all", Home: "all" };
  holder.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    doing[keys[event.key]]();
  });

  function find(x, y) {
    const time = begin + (x - LABEL) / (width - LABEL - 6) * (end - begin);
    for (let i = ranks.length - 1; i >= 0; i--) {
      if (y < rows[i]) continue;
      const lane = Math.floor((y - rows[i]) / ROW);
      const hit = ranks[i].spans.filter((s) => s[1] === lane && s[2] <= time && time <= s[2] + s[3]);
      return hit.length ? [ranks[i].rank, hit[hit.length - 1]] : null;
    }
    return null;
  }

  let drag = null;
  holder.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, begin, end };
    holder.setPointerCapture(event.pointerId);
  });
  holder.addEventListener("pointermove", (event) => {
    if (drag) {
      const shift = (drag.x - event.clientX) / (width - LABEL) * (drag.end - drag.begin);
      look(drag.begin + shift, drag.end + shift);
      return;
    }
    const place = canvas.getBoundingClientRect();
    under = find(event.clientX - place.left, event.clientY - place.top);
    if (!under) return;
    const [rank, [name, , start, long, facts]] = under;
    readout.textContent = "Worker " + rank + ": " + names[name] + ", " + sayTime(long) + ", from " + sayTime(Math.max(0, start)) + (facts ? " (" + facts + ")" : "") + ".";
  });
  for (const kind of ["pointerup", "pointercancel"]) holder.addEventListener(kind, () => { drag = null; });
  holder.addEventListener("pointerleave", () => { under = null; });
  holder.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const x = event.clientX - canvas.getBoundingClientRect().left;
    zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, begin + (x - LABEL) / (width - LABEL - 6) * (end - begin));
  }, { passive: false });

  readColours();
  repaints.push(() => { readColours(); paint(); });
  new ResizeObserver(queue).observe(holder);
  look(begin, end);
}

// Tables that fit need no stop of their own on the way through the page by keyboard.
function setStops() {
  for (const box of document.querySelectorAll(".scroll")) {
    if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
    else box.removeAttribute("tabindex");
  }
}

// Paper is light.
let chosen;
addEventListener("beforeprint", () => { chosen = root.dataset.theme; root.dataset.theme = "light"; showTheme(); });
addEventListener("afterprint", () => { if (chosen) root.dataset.theme = chosen; else delete root.dataset.theme; showTheme(); });

setStops();
addEventListener("resize", setStops);
document.querySelectorAll(".stepper").forEach(setUpStepper);
document.querySelectorAll(".chart-box").forEach(drawChart);
document.querySelectorAll(".timeline").forEach(setUpTimeline);
showTheme();
root.dataset.ready = "true";
