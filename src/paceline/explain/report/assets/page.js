"use strict";
// Draws the report from the document in this file. A panel is a function of its part of the
// document, so whatever has such a document can show the same panels. Text goes in as text only.

const { h, render } = preact;
const { useEffect, useLayoutEffect, useRef, useState } = preactHooks;
const html = htm.bind(h);
const root = document.documentElement;

// Numbers as people read them; what nobody knows is a dash.
const NOTHING = "\u2013", SPACE = "\u00a0";
const isNumber = (value) => typeof value === "number";

function figure(value, digits = 3) {
  if (value === null || value === undefined) return NOTHING;
  if (!isNumber(value)) return { nan: "not a number", inf: "∞", "-inf": "-∞" }[value] || String(value);
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e12)) return value.toExponential(digits - 1);
  const rounded = size >= 10 ** digits ? Math.round(value) : Number(value.toPrecision(digits));
  return rounded.toLocaleString("en", { maximumFractionDigits: 12 });
}

function count(value, noun) { return figure(value) + " " + noun + (value === 1 ? "" : "s"); }

function percent(share) {
  return isNumber(share) ? (100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0) + SPACE + "%" : NOTHING;
}

function duration(s) {
  if (!isNumber(s)) return NOTHING;
  if (s < 1e-4) return Math.round(s * 1e6) + SPACE + "µs";
  if (s < 0.9995) return Number((s * 1e3).toPrecision(3)) + SPACE + "ms";
  if (s < 60) return Number(s.toPrecision(3)) + SPACE + "s";
  const two = (n) => String(n).padStart(2, "0"), whole = Math.round(s), hours = Math.floor(whole / 3600);
  return (hours ? hours + ":" + two(Math.floor(whole / 60) % 60) : Math.floor(whole / 60)) + ":" + two(whole % 60);
}

function bytes(amount) {
  if (!isNumber(amount)) return NOTHING;
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(1, amount)) / 3)));
  return (amount / 1000 ** power).toFixed(power ? 1 : 0) + SPACE + ["B", "kB", "MB", "GB", "TB"][power];
}

function moment(seconds) {
  const when = new Date(isNumber(seconds) ? 1000 * seconds : NaN);
  return isNaN(when) ? "unknown" : when.toISOString().slice(0, 16).replace("T", " ") + " UTC";
}

function sentence(text) { return text.charAt(0).toUpperCase() + text.slice(1); }

// Colours: the system's choice until somebody presses the button. What is drawn on a canvas asks
// for its colours and is drawn again when they change.
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const repaints = new Set();

function isDark() { return root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches; }

function setTheme(theme) {
  if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
  for (const repaint of repaints) repaint();
}

systemDark.addEventListener("change", () => setTheme(root.dataset.theme));
let chosen;
addEventListener("beforeprint", () => { chosen = root.dataset.theme; setTheme("light"); }); // paper is light
addEventListener("afterprint", () => setTheme(chosen));

function onRepaint(repaint) {
  repaints.add(repaint);
  return () => repaints.delete(repaint);
}

function colourOf(look, variable = "--look") {
  const probe = document.createElement("i");
  probe.className = "look-" + look;
  probe.style.color = "var(" + variable + ")";
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function Theme() {
  const [dark, setDark] = useState(isDark());
  useEffect(() => onRepaint(() => setDark(isDark())), []);
  return html`<button type="button" id="theme" aria-label=${dark ? "Use light colours" : "Use dark colours"}
    onClick=${() => setTheme(dark ? "light" : "dark")}>${dark ? "Light" : "Dark"}</button>`;
}

// Pieces that several panels use.
function Table({ caption, head, rows, words = [0] }) {
  const look = (column) => (words.includes(column) ? "" : "number");
  return html`<div class="scroll" role="region" aria-label=${caption}><table>
    <caption>${caption}</caption>
    <thead><tr>${head.map((cell, i) => html`<th class=${look(i)} scope="col">${cell}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell, i) => html`<td class=${look(i)}>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

function Legend({ entries }) {
  return html`<ul class="legend">${entries.map(([look, name, meaning]) => html`<li>
    <svg viewBox="0 0 12 12" class=${"swatch look-" + look} aria-hidden="true"><rect width="12" height="12" rx="2" class="fill"/></svg>
    <b>${name}</b> ${meaning}</li>`)}</ul>`;
}

// One bar below the other: a name, its pieces (look, share of the width, words) and a value.
function Bars({ rows }) {
  return html`<ul class="bars">${rows.map(([name, pieces, value]) => {
    let x = 0;
    const drawn = pieces.map(([look, share, said]) => {
      x += 1000 * share;
      return html`<rect x=${x - 1000 * share} width=${Math.max(1000 * share - 1.5, 0.8)} height="22" class=${"fill look-" + look}><title>${said}</title></rect>`;
    });
    return html`<li><span class="bar-label">${name}</span>
      <svg viewBox="0 0 1000 22" class="bar" preserveAspectRatio="none" role="img" aria-label=${pieces.map((each) => each[2]).join(", ")}>${drawn}</svg>
      <span class="bar-value">${value}</span></li>`;
  })}</ul>`;
}

function Note({ children }) { return html`<p class="note">${children}</p>`; }

function more(shown, inAll, noun) {
  return inAll > shown && html`<${Note}>${"… and " + count(inAll - shown, noun) + " more."}<//>`;
}

// Curves. Columns of a curve: x, mean, lowest, highest. See rangeOf for what is cut off.
const NEAR_PX = 40;

// The lowest and highest value drawn, and the peak that is cut off so that the rest can be seen.
// A loss may fall from high up in its first steps: that is not a peak.
function rangeOf(curves, zero) {
  const all = (column) => curves.flatMap((curve) => curve.columns[column]);
  const means = all(1), xs = all(0), highs = all(3), rising = [...means].sort((a, b) => a - b);
  const begin = means.slice(0, means.length / 10 + 1).sort((a, b) => a - b);
  const usual = Math.max(begin[begin.length >> 1], rising[Math.floor((means.length - 1) * 0.97)]);
  let low = Math.min(...all(2)), high = Math.max(...highs), cut = null;
  if (means.length > 20 && high > usual + 3 * Math.max(usual - low, Math.abs(usual) * 1e-3)) {
    cut = [high, xs[highs.indexOf(high)]];
    high = Math.max(usual + 0.5 * (usual - low), usual * 1.1);
  }
  if (zero) low = Math.min(0, low);
  if (high > low) return [low, high + (high - low) * 0.05, cut];
  const margin = Math.abs(low) * 0.1 || 1;
  return [zero ? low : low - margin, high + margin, cut];
}

function chartOptions({ curves, say, range, xLabel, log, marks, height }, onCursor) {
  const stroke = () => colourOf("", "--muted"), grid = { stroke: () => colourOf("", "--rule"), width: 1 };
  const axis = { stroke, grid, ticks: { show: false }, font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif" };
  const series = curves.flatMap(({ look, dots, dash, columns }) => [
    {
      stroke: () => colourOf(look), width: 1.8, dash, spanGaps: true,
      points: { show: dots || columns[0].length === 1, size: 7, fill: () => (dash ? colourOf("", "--card") : colourOf(look)) },
    },
    { width: 0, points: { show: false }, spanGaps: true },
    { width: 0, points: { show: false }, spanGaps: true },
  ]);
  const bands = curves.map(({ look }, i) => ({ series: [3 * i + 3, 3 * i + 2], fill: () => colourOf(look).replace(")", ", 0.22)").replace("rgb(", "rgba(") }));
  return {
    width: 300, height, legend: { show: false }, series: [{}, ...series], bands,
    cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
    scales: {
      x: { time: false, distr: log ? 3 : 1, log: 2, range: (_, low, high) => (low < high ? [low, high] : [low - 1, high + 1]) },
      y: { distr: log ? 3 : 1, log: 2, range: range.slice(0, 2) },
    },
    axes: [
      { ...axis, label: xLabel, labelSize: 16, size: 26, incrs: [1, 2, 5].flatMap((n) => [...Array(13).keys()].map((p) => n * 10 ** p)).sort((a, b) => a - b), values: (_, at) => at.map((x) => figure(x)), ...(marks && { splits: () => marks }) },
      { ...axis, values: (_, at) => at.map((y) => (y === null ? "" : say(y))), size: (_, at) => Math.max(34, 10 + 6.4 * Math.max(...(at || [""]).map((each) => each.length))), ...(log && { splits: () => powersOfTwo(...range) }) },
    ],
    hooks: { setCursor: [onCursor] },
  };
}

function powersOfTwo(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log2(low)); power <= Math.log2(high); power++) found.push(2 ** power);
  return found.filter((_, i) => i % (1 + (found.length >> 3)) === 0);
}

function Chart({ title, curves, say = figure, said = "", xLabel = "step", log = false, zero = false, marks = null, height = 212 }) {
  const box = useRef(null), holder = useRef(null), tip = useRef(null);
  const range = rangeOf(curves, zero), cut = range[2];
  useEffect(() => {
    const plot = new uPlot(chartOptions({ curves, say, range, xLabel, log, marks, height }, showTip), uPlot.join(curves.map((curve) => curve.columns)), holder.current);
    const fit = () => plot.setSize({ width: holder.current.clientWidth, height });
    const observer = new ResizeObserver(fit);
    observer.observe(holder.current);
    const forget = onRepaint(() => plot.redraw(false));
    let at = plot.data[0].length - 1;

    function hide() { tip.current.hidden = true; }

    function showTip(u) {
      const { idx, left } = u.cursor;
      if (idx === null || idx === undefined || left < 0) return hide();
      at = idx;
      const near = curves.map(({ label }, i) => [label, nearest(u, 3 * i + 1, idx)]).filter((each) => each[1] !== null);
      tip.current.textContent = xLabel + " " + Math.round(u.data[0][idx]).toLocaleString("en") + ": "
        + near.map(([label, value]) => (curves.length > 1 ? label + " " : "") + say(value)).join(", ");
      tip.current.hidden = false;
      const place = u.over.getBoundingClientRect(), around = box.current.getBoundingClientRect();
      const x = place.left - around.left + left - tip.current.offsetWidth / 2;
      tip.current.style.left = Math.max(0, Math.min(around.width - tip.current.offsetWidth, x)) + "px";
      tip.current.style.top = place.top - around.top - tip.current.offsetHeight + 8 + "px";
    }

    function move(event) {
      const last = plot.data[0].length - 1, big = Math.max(1, Math.round(last / 20));
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - big, PageDown: at + big, Home: 0, End: last };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      const index = Math.max(0, Math.min(last, moves[event.key]));
      plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: 0 });
    }

    holder.current.addEventListener("keydown", move);
    holder.current.addEventListener("blur", hide);
    fit();
    return () => { observer.disconnect(); forget(); plot.destroy(); };
  }, []);
  return html`<figure class="chart-box" ref=${box}>
    <figcaption><strong>${title}</strong>${curves.length > 1 && html`<${Legend} entries=${curves.map(({ look, label }) => [look, label])}/>`}</figcaption>
    <div class="chart" ref=${holder} tabindex="0" role="img" aria-label=${title + ". " + said}></div>
    <div class="tip" role="status" ref=${tip} hidden></div>
    <p class="said">${said}</p>
    ${cut && html`<${Note}>A peak of ${say(cut[0])} near ${xLabel} ${figure(Math.round(cut[1]))} is cut off, so that the rest can be seen.<//>`}
  </figure>`;
}

// The value of a curve near a place on the axis; curves need not have a point at the same x.
function nearest(plot, series, index) {
  const [xs, ys] = [plot.data[0], plot.data[series]], x = plot.valToPos(xs[index], "x");
  for (let apart = 0; apart < xs.length; apart++) {
    const close = [index - apart, index + apart].filter((i) => Math.abs(plot.valToPos(xs[i], "x") - x) <= NEAR_PX);
    if (!close.length) return null;
    const found = close.find((i) => isNumber(ys[i]));
    if (found !== undefined) return ys[found];
  }
  return null;
}

// Panels, in reading order.
function Overview({ data }) {
  const status = { stopped: "stopped early" }[data.status] || data.status;
  return html`<section id="overview" aria-label="Overview">
    <div class="headline"><h1>${data.name}</h1>${status && html`<span class=${"badge " + data.status}>${status}</span>`}</div>
    <div class="story">${data.sentences.map((each) => html`<p>${each}</p>`)}</div>
    <dl class="tiles">${data.tiles.map(([label, value, note]) => html`<div><dt>${label}</dt><dd>${value}<small>${note}</small></dd></div>`)}</dl>
    ${data.missing.length > 0 && html`<div class="missing"><strong>What this page cannot show</strong><ul>${data.missing.map((each) => html`<li>${each}</li>`)}</ul></div>`}
  </section>`;
}

function Learning({ data: { charts, epochs, evaluations } }) {
  const shares = charts.filter((chart) => chart.is_share).map((chart) => chart.name);
  return html`<div class="charts">${charts.map((chart) => html`<${Metric} ...${chart}/>`)}</div><${Epochs} ...${{ epochs, evaluations, shares }}/>`;
}

function Metric({ name, curves, is_share = false, first_bad = null }) {
  const say = is_share ? percent : figure, [, means, lows, highs] = curves[0].columns;
  let said = "From " + say(means[0]) + " to " + say(means[means.length - 1]) + "; "
    + (is_share ? "highest " + say(Math.max(...means)) : "lowest " + say(Math.min(...means))) + ".";
  if (highs.some((high, i) => high > lows[i])) said += " The pale band holds the lowest and highest steps.";
  if (first_bad !== null) said += " Values that are not numbers, first at step " + figure(first_bad) + ".";
  const zero = is_share || curves[0].look === "rate" || (name === "loss" && Math.min(...lows) >= 0);
  return html`<${Chart} title=${sentence(name)} ...${{ curves, say, said, zero }}/>`;
}

const ROWS_LIMIT = 60;

// At most so many rows, evenly spread, the first and the last among them.
function spread(rows) {
  const apart = Math.max(1, (rows.length - 1) / (ROWS_LIMIT - 1));
  return rows.filter((_, i) => Math.floor(i / apart) > Math.floor((i - 1) / apart));
}

function Epochs({ epochs, evaluations, shares }) {
  const byEpoch = (events) => new Map(events.map((event) => [event.epoch, event]));
  const kinds = [["", byEpoch(epochs)], [" (held-out)", byEpoch(evaluations)]];
  const numbers = [...new Set(kinds.flatMap(([, events]) => [...events.keys()]))].filter(isNumber).sort((a, b) => a - b), shown = spread(numbers);
  if (!numbers.length) return null;
  const metricsOf = (events, number) => (events.get(number) || {}).metrics || {};
  const columns = kinds.flatMap(([where, events]) => [...new Set(numbers.flatMap((number) => Object.keys(metricsOf(events, number))))].map((name) => [name, where, events])).slice(0, 8);
  const rows = shown.map((number) => {
    const { samples, seconds } = kinds[0][1].get(number) || {};
    const cells = columns.map(([name, , events]) => (shares.includes(name) ? percent : figure)(metricsOf(events, number)[name]));
    return [number + 1, ...cells, figure(samples), duration(seconds), figure(samples / seconds || null)];
  });
  return html`<${Table} caption="Epoch by epoch, means over all samples" head=${["epoch", ...columns.map(([name, where]) => name + where), "samples", "time", "samples/s"]} rows=${rows}/>
    ${shown.length < numbers.length && html`<${Note}>${count(numbers.length - shown.length, "epoch")} between these rows are left out.<//>`}`;
}

// One recorded step. What belongs to a worker stands in that worker's column and colour; what
// belongs to all is as wide as the picture. So a batch that is cut up fans out, and outputs that are
// gathered come together. In an all-reduce every worker gets something from every other one.
const COLUMNS = 4, COLOURS = 6, WIDTH = 400;

function nounOf(trace) { return trace.engine === "DistributedDataParallel" ? "worker" : "replica"; }

function shapeOf({ name, shape, dtype, bytes: size }) {
  if (shape.length === 1) {
    const words = name.split(" "), nouns = ["row", "gradient", "weight"];
    return count(shape[0], nouns.find((noun) => words.some((word) => word.startsWith(noun))) || "value");
  }
  if (shape.length) return shape.map((each) => figure(each)).join(" × ");
  return dtype ? "one number" : name + ", " + bytes(size);
}

function valuesOf(values) { return values.slice(0, 3).map((each) => figure(each)).join(", ") + (values.length > 3 ? " …" : ""); }

function Contents({ first, stats }) {
  const range = stats && figure(stats.min) + " to " + figure(stats.max) + ", mean " + figure(stats.mean);
  return html`<span class="values">${first && first.length ? valuesOf(first) : range || NOTHING}</span>`;
}

// What stands side by side: a part each, or the first ones and how many more there are.
function columnsOf({ title, parts, parts_in_all: inAll }) {
  const shown = inAll > COLUMNS ? parts.slice(0, COLUMNS - 1) : parts.length ? parts : [{ title, worker: null, tensors: [], text: "" }];
  const columns = shown.map((part) => ({ ...part, look: part.worker === null ? "all" : "worker" + (part.worker % COLOURS) }));
  if (inAll > COLUMNS) columns.push({ title: "… " + figure(inAll - COLUMNS + 1) + " more", look: "more", tensors: [], text: "alike" });
  return columns;
}

// Every worker fills buckets of its own, all in the same way, so a recording has them only once.
function rowsOf({ stages, workers }) {
  const rows = [];
  for (const stage of stages) {
    const isShared = stage.name === "buckets" && workers > 1 && rows.length && stage.parts.every((part) => part.worker === null);
    const own = { tensors: stage.parts.flatMap((part) => part.tensors), seconds: null };
    rows.push(isShared ? rows[rows.length - 1].map((part) => (part.look === "more" ? part : { ...part, ...own })) : columnsOf(stage));
  }
  return rows;
}

// A small rectangle whose sides follow rows and columns.
function Glyph({ shape, mostRows }) {
  if (shape.length < 2 || shape.includes(0)) return null;
  const wide = shape.slice(1).reduce((a, b) => a * b, 1), side = (share, most) => Math.max(3, most * Math.sqrt(Math.min(1, share)));
  const width = side(wide / 100, 46), height = side(shape[0] / mostRows, 50);
  return html`<svg width=${width} height=${height} aria-hidden="true"><rect width=${width} height=${height} rx="1.5" class="tensor fill"/></svg>`;
}

function Box({ part, mostRows, isFollowed }) {
  const [first, ...others] = part.tensors;
  const isSingle = first && first.first && first.first.length && !first.shape.length;
  const shown = first ? (isSingle ? figure(first.first[0]) : shapeOf(first)) : part.text;
  return html`<div class=${"box look-" + part.look}>
    ${first && html`<${Glyph} shape=${first.shape} mostRows=${mostRows}/>`}
    <div><b>${part.title}</b>${shown && html`<code>${shown}</code>`}
      ${others.length ? html`<small>and ${others.length} more</small>` : isNumber(part.seconds) && html`<small>${duration(part.seconds)}</small>`}</div>
    ${isFollowed && html`<span class="followed" aria-hidden="true">●</span>`}
  </div>`;
}

// Lines from each box of a row to each of the next; between equal columns straight down, unless all
// are joined.
const middleOf = (index, row) => ((index + 0.5) / row.length) * WIDTH;

function Joins({ above, below, joinsAll }) {
  const isStraight = above.length === below.length && !joinsAll;
  const pairs = above.flatMap((from, i) => below.map((to, j) => [from, i, to, j])).filter(([, i, , j]) => !isStraight || i === j);
  return html`<svg class="joins" viewBox=${"0 0 " + WIDTH + " 26"} preserveAspectRatio="none" aria-hidden="true">${pairs.map(([from, i, to, j]) => {
    const a = middleOf(i, above), b = middleOf(j, below), isShared = ["all", "more"].includes(from.look);
    return html`<g class=${"look-" + (isShared ? to : from).look}>
      <path class="join stroke" d=${"M" + a + " 0C" + a + " 13 " + b + " 13 " + b + " 21"}/><path class="fill" d=${"M" + b + " 26l-4 -7h8z"}/></g>`;
  })}</svg>`;
}

function Rest({ row }) {
  return html`<svg class="rest" viewBox=${"0 0 " + WIDTH + " 10"} preserveAspectRatio="none" aria-hidden="true">
    ${row.map((part, i) => html`<path class=${"join stroke look-" + part.look} d=${"M" + middleOf(i, row) + " 0V10"}/>`)}</svg>`;
}

function Followed({ trace, stage }) {
  const here = (followed) => (followed ? followed.stops : []).filter((stop) => stop.stage === stage.name).slice(0, COLUMNS);
  const noun = nounOf(trace), { sample, weight } = trace;
  const rows = here(sample).map(({ worker, row, values }) => "row " + row + (worker === null ? "" : " of " + noun + " " + worker) + (values && values.length ? ": " + valuesOf(values) : ""));
  const values = here(weight).map(({ what, by_worker: by, is_equal: equal }) => {
    const said = (by || []).slice(0, COLUMNS).map((value, n) => figure(value, 6) + (by.length > 1 ? " on " + noun + " " + n : ""));
    return what + ": " + (said.join(", ") || "not recorded") + (equal === null ? "" : equal ? " (the same bits everywhere)" : " (not the same!)");
  });
  return html`
    ${rows.length > 0 && html`<p><span class="followed-sign" aria-hidden="true">●</span> The followed sample (number ${figure(sample.index)}) is ${rows.join("; ")}.</p>`}
    ${values.length > 0 && html`<p><span class="followed-sign" aria-hidden="true">◆</span> The followed weight <code>${weight.name}[${weight.index.join(", ")}]</code> has ${values.join("; ")}.</p>`}`;
}

function Parts({ stage }) {
  const rows = stage.parts.flatMap((part) => part.tensors.map((tensor) => [
    part.title, html`<code>${tensor.name}</code>`, html`<span class="keep">${shapeOf(tensor)}</span>`,
    tensor.dtype.replace("torch.", ""), tensor.device, html`<${Contents} ...${tensor}/>`, bytes(tensor.bytes),
  ]));
  const said = stage.parts.filter((part) => part.text);
  if (!rows.length) return said.length > 1 && html`<ul>${said.map((part) => html`<li>${part.title}: ${part.text}</li>`)}</ul>`;
  const head = ["where", "tensor", "shape", "type", "device", "values", "size"];
  return html`<${Table} caption=${sentence(stage.title) + ": what is where"} head=${head} rows=${rows.slice(0, 16)} words=${[0, 1, 2, 3, 4, 5]}/>
    ${more(Math.min(rows.length, 16), Math.max(rows.length, stage.parts_in_all), "part")}`;
}

function StageWords({ trace, stage, number }) {
  const facts = [stage.bytes_moved ? bytes(stage.bytes_moved) + " moved" : "", isNumber(stage.seconds) ? "took " + duration(stage.seconds) : ""].filter(Boolean);
  return html`<div class="stage-words"><h4><span class="ordinal">${number}</span>${sentence(stage.title)}</h4><p>${stage.text}</p>
    ${facts.length > 0 && html`<p class="facts">${facts.join(" · ")}</p>`}
    <div class="details"><${Followed} ...${{ trace, stage }}/><${Parts} stage=${stage}/></div></div>`;
}

// One stage at a time; the others stay visible without their details.
function Stepper({ trace }) {
  const { stages } = trace, last = stages.length - 1;
  const [now, setNow] = useState(0), [everything, setEverything] = useState(false), list = useRef(null);
  const moved = useRef(false);
  const go = (index) => { moved.current = true; setNow(Math.max(0, Math.min(last, index))); };
  useEffect(() => { if (moved.current) list.current.children[now].scrollIntoView({ block: "nearest" }); }, [now]);
  const onKey = (event) => {
    if (event.target.closest(".scroll") || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowLeft: now - 1, ArrowUp: now - 1, ArrowRight: now + 1, ArrowDown: now + 1, Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    go(moves[event.key]);
  };
  const firsts = stages.flatMap((stage) => stage.parts.flatMap((part) => part.tensors.slice(0, 1))).filter((tensor) => tensor.shape.length);
  const mostRows = Math.min(Math.max(1, ...firsts.map((tensor) => tensor.shape[0])), 4 * Math.max(1, trace.batch_rows));
  const rows = rowsOf(trace), stops = trace.sample ? trace.sample.stops : [];
  const button = (name, label, sign, act, off) => html`<button type="button" class=${name} aria-label=${label} title=${label} disabled=${off} onClick=${act}>${sign}</button>`;
  return html`<div class=${"stepper" + (everything ? "" : " stepping")} tabindex="0" role="group" aria-label="One batch, stage by stage" onKeyDown=${onKey}>
    <div class="controls">
      ${button("back", "Back", "◀", () => go(now - 1), now === 0)}<span class="place" role="status">Stage ${now + 1} of ${stages.length}</span>
      ${button("next", "Next", "▶", () => go(now + 1), now >= last)}
      <button type="button" class="all" aria-pressed=${String(everything)} onClick=${() => setEverything(!everything)}>Show all stages</button>
      <span class="hint">or use the arrow keys</span></div>
    <ol class="stages" ref=${list}>${stages.map((stage, i) => html`<li class=${"stage" + (i === now ? " now" : i > now ? " later" : "")} aria-current=${i === now ? "step" : null}
        onClick=${() => { if (i !== now && !String(getSelection())) setNow(i); }}>
      <div class="stage-picture">
        ${i > 0 && html`<${Joins} above=${rows[i - 1]} below=${rows[i]} joinsAll=${stage.name === "all-reduce"}/>`}
        <div class="boxes">${rows[i].map((part) => html`<${Box} part=${part} mostRows=${mostRows} isFollowed=${stops.some((stop) => stop.stage === stage.name && stop.worker === part.worker)}/>`)}</div>
        ${i < last && html`<${Rest} row=${rows[i]}/>`}
      </div><${StageWords} ...${{ trace, stage }} number=${i + 1}/></li>`)}</ol>
  </div>`;
}

function Check({ trace, check }) {
  const [sign, look] = check.is_same === null ? [NOTHING, "open"] : check.is_same ? ["✓", "good"] : ["✗", "bad"];
  const equal = check.is_equal_on_all === null ? "" : "; all " + nounOf(trace) + "s ended with " + (check.is_equal_on_all ? "the same" : "not the same") + " bits";
  return html`<div class=${"verdict " + look}><p><span class="sign" aria-hidden="true">${sign}</span> <strong>${sentence(check.text) + equal}</strong></p>
    ${check.how === "whole batch" && html`<${Note}>The same step was computed once more in one process on the whole batch, and compared.<//>`}
    ${check.reason && html`<${Note}>${check.reason}<//>`}</div>`;
}

function Prediction({ index, input, layers, layers_in_all: inAll, answer }) {
  const row = (name, kind, output, weights) => [html`<code>${name}</code>`, kind, html`<span class="keep">${shapeOf(output)}</span>`, html`<${Contents} ...${output}/>`, figure(weights || null)];
  const rows = [...input.slice(0, 4).map((tensor) => row(tensor.name, "input", tensor, 0)), ...layers.map((layer) => row(layer.name || "(model)", layer.kind, layer.output, layer.parameters))];
  return html`<h3>One sample through the trained model</h3><p>Sample ${figure(index)} goes through every layer to the answer.</p>
    <${Table} caption="Prediction for one sample, layer by layer" head=${["layer", "what it is", "output", "values", "weights"]} rows=${rows} words=${[0, 1, 2, 3]}/>
    ${more(layers.length, inAll, "layer")}${answer && html`<p><strong>${sentence(answer.text)}</strong></p>`}`;
}

function Training({ epochs, observation }) {
  const head = ["epoch", "loss", "accuracy", "held-out accuracy", "time", "what the numbers say"];
  const rows = epochs.map((row) => [figure(row.epoch), figure(row.loss), percent(row.accuracy), percent(row.evaluation_accuracy), duration(row.seconds), row.observation]);
  return html`<h3>The epochs after it</h3><p>${observation}</p><${Table} caption="Epochs of the trace" head=${head} rows=${rows} words=${[0, 5]}/>`;
}

function Pipeline({ data }) {
  return data.map((trace) => html`${data.length > 1 && html`<h3>Step ${figure(trace.step)}</h3>`}
    <p>A real step, as it was recorded (step ${figure(trace.step)}): ${count(trace.batch_rows, "row")} through ${trace.model.name} (${count(trace.model.parameters, "weight")}) on ${count(trace.workers, nounOf(trace))}, with ${trace.engine}.</p>
    ${trace.check && html`<${Check} trace=${trace} check=${trace.check}/>`}
    ${trace.stages.length > 0 && html`<${Stepper} trace=${trace}/>`}
    ${trace.training && html`<${Training} ...${trace.training}/>`}${trace.prediction && html`<${Prediction} ...${trace.prediction}/>`}`);
}

// Waiting belongs to whoever is waited for, so it is hatched.
function Workers({ data: { verdict, slow_rank: slow, phases, ranks, ranks_in_all: inAll } }) {
  const wholeOf = (rank) => Object.values(rank.phases_s).reduce((a, b) => a + b, 0), measured = ranks.filter(wholeOf);
  const longest = Math.max(...measured.map(wholeOf)), used = Object.keys(phases).filter((phase) => ranks.some((rank) => phase in rank.phases_s));
  const bars = measured.map((rank) => [
    html`worker ${rank.rank}${rank.rank === slow && html`<em> slow</em>`}`,
    used.filter((phase) => rank.phases_s[phase]).map((phase) => [phase, rank.phases_s[phase] / longest, phase + ": " + duration(rank.phases_s[phase])]),
    duration(wholeOf(rank)),
  ]);
  const where = [...new Set(ranks.map((rank) => rank.where))].filter(Boolean).slice(0, 8);
  const rows = ranks.map((rank) => [rank.rank, figure(rank.samples), html`<b>${duration(rank.own_s)}</b>`, ...used.map((phase) => duration(rank.phases_s[phase])), rank.phases_s.wait ? percent(rank.phases_s.wait / wholeOf(rank)) : NOTHING]);
  return html`<p class=${"verdict " + (slow === null ? "good" : "bad")}>${verdict}</p>
    ${inAll > ranks.length && html`<${Note}>${figure(inAll)} workers took part; shown are the ${ranks.length} whose own work takes longest and shortest.<//>`}
    ${bars.length > 0 && html`<figure><figcaption><strong>An average step of each worker</strong></figcaption><${Bars} rows=${bars}/>
      <${Legend} entries=${used.map((phase) => [phase, phase, phases[phase]])}/></figure>`}
    <${Table} caption="Times are averages of one step" head=${["worker", "samples", "own work", ...used, "time waiting"]} rows=${rows}/>
    ${where.length > 0 && html`<${Note}>They ran on: ${where.join(", ")}.<//>`}`;
}

const MODES = {
  strong: "Strong scaling: the batch stays the same, and more workers share it.",
  weak: "Weak scaling: every worker keeps its part, so more workers mean a larger batch.",
};

function Scaling({ data: { mode, measured, predicted, meanings, suggestion, check } }) {
  const last = measured[measured.length - 1], networks = [...new Set(predicted.map((size) => size.network))];
  const groups = networks.map((network) => ["predicted" + (network ? ", " + network : ""), predicted.filter((size) => size.network === network)]);
  const every = [...measured, ...predicted], marks = [...new Set([1, 2, ...every.map((size) => size.workers)])].sort((a, b) => a - b);
  const line = (label, look, sizes, dots, dash) => {
    const speeds = sizes.map((size) => size.speedup);
    return { label, look, dots, dash, columns: [sizes.map((size) => size.workers), speeds, speeds, speeds] };
  };
  const curves = [
    line("measured", "measured", measured, true),
    ...groups.map(([how, sizes], i) => line(how, "predicted" + (i % 3), sizes[0].workers > last.workers ? [last, ...sizes] : sizes, true, [6, 5])),
    line("ideal: n workers, n times as fast", "ideal", marks.map((workers) => ({ workers, speedup: workers })), false, [1, 4]),
  ];
  const rows = [["measured", measured], ...groups].flatMap(([how, sizes]) => sizes.map((size) => [figure(size.workers), how, figure(size.speedup), percent(size.of_ideal), duration(size.step_s)]));
  const verdict = last.workers > 1
    ? count(last.workers, "worker") + " are " + figure(last.speedup) + " times as fast as one: " + percent(last.of_ideal) + " of the ideal."
    : "Only one worker was measured, so there is nothing to compare it with.";
  const isLong = marks[marks.length - 1] > 16, said = predicted.length ? "Dashed lines are predicted, not measured." : "";
  return html`<p class="verdict"><strong>${verdict}</strong></p><p>${MODES[mode]}</p>
    <${Chart} title="How many times as fast as one worker" xLabel="workers" say=${(value) => figure(value) + " ×"} log=${isLong} zero=${!isLong} height=${300} ...${{ curves, marks, said }}/>
    <${Table} caption="Speed-up by number of workers" head=${["workers", "how", "times as fast", "of the ideal", "time of a step"]} rows=${rows} words=${[0, 1]}/>
    <${Losses} ...${{ measured, meanings }}/>
    ${suggestion && html`<h3>One thing to try</h3><p>${sentence(suggestion)}</p>`}
    ${check && html`<h3>How good the prediction is</h3><p>${sentence(check)}</p>`}`;
}

function Losses({ measured, meanings }) {
  const sizes = measured.filter((size) => Object.keys(size.lost).length);
  if (!sizes.length) return null;
  const names = Object.keys(meanings).filter((name) => sizes.some((size) => name in size.lost));
  const say = (share) => (share === undefined ? NOTHING : share + SPACE + "%");
  const bars = sizes.map(({ workers, of_ideal, lost }) => [
    count(workers, "worker"), names.filter((name) => lost[name]).map((name) => [name, lost[name] / 100, name + ": " + say(lost[name])]), percent(1 - of_ideal) + " lost",
  ]);
  return html`<h3>Where the rest went</h3><p>What keeps the workers from the ideal, as shares of the time that is lost.</p>
    <${Bars} rows=${bars}/><${Legend} entries=${names.map((name) => [name, name, meanings[name]])}/>
    <${Table} caption="Shares of the lost time" head=${["workers", ...names]} rows=${sizes.map((size) => [figure(size.workers), ...names.map((name) => say(size.lost[name]))])}/>`;
}

function Checkpoints({ data }) {
  const rows = data.slice(-ROWS_LIMIT), left = data.length - rows.length;
  const cells = rows.map((row) => [html`<span class="keep">${figure(row.name)}</span>`, row.is_there ? "there" : "deleted since", figure(row.step), bytes(row.bytes), duration(row.seconds), figure(row.metric)]);
  return html`<p>${count(data.length, "checkpoint")} written, the last one after step ${figure(data[data.length - 1].step)}; ${data.filter((row) => row.is_there).length} of them still in the folder. A checkpoint holds everything that a run needs to continue.</p>
    <${Table} caption="Checkpoints" head=${["name", "now", "after step", "size", "time to save", "metric"]} rows=${cells} words=${[0, 1]}/>
    ${left > 0 && html`<${Note}>${count(left, "older one")} not shown.<//>`}`;
}

function Settings({ info: { name, status, schema, policy, versions, created, updated, ...numbers } }) {
  const items = [["created", moment(created)], ["updated", moment(updated)], ...Object.entries(numbers).map(([key, value]) => [key.replaceAll("_", " "), value]), ...Object.entries(versions).slice(0, 8)];
  return html`<dl class="settings">${items.map(([key, value]) => html`<div><dt>${key}</dt><dd>${figure(value, 6)}</dd></div>`)}</dl>
    ${policy.length > 0 && html`<h3>What was decided, and why</h3><ul>${policy.slice(0, 20).map((line) => html`<li>${line}</li>`)}</ul>`}`;
}

function Details({ data: { info, noise, began, messages, messages_limit: limit } }) {
  return html`${info && html`<${Settings} info=${info}/>`}
    ${noise && html`<h3>Is the batch the right size?</h3><p>At step ${figure(noise.step)} the gradient noise scale was ${figure(noise.noise_scale)}: larger batches than about that many samples bring little more. ${figure(noise.advice || "")}</p>`}
    ${messages.length > 0 && html`<h3>What the run said</h3>${messages.length === limit && html`<p>These are the last ${limit} messages.</p>`}
      <ul class="messages">${messages.map(({ t, rank, level, text }) => html`<li class=${["warning", "error"].includes(level) ? level : ""}>
        <span class="when">${t && isNumber(began) ? (t - began).toFixed(1) + " s" : NOTHING}</span><span class="who">worker ${rank}</span><span class="text">${figure(text)}</span></li>`)}</ul>`}`;
}

// Timeline: the spans of some steps on a canvas, to be zoomed and moved.
const ROW = 18, GAP = 10, TOP = 22, LABEL = 84;
const ZOOMS = [["out", "\u2212", "Zoom out"], ["in", "+", "Zoom in"], ["left", "◀", "Earlier"], ["right", "▶", "Later"], ["all", "All", "Show the whole window"]];

function sayTime(us) { return us < 1e-6 ? "0" : duration(us / 1e6); }

function Timeline({ data }) {
  const { steps: [first, last], length, names, phases, notes } = data, view = useRef(null);
  const holder = useRef(null), readout = useRef(null);
  useEffect(() => {
    view.current = timelineView(holder.current, (text) => { readout.current.textContent = text; }, data);
    return view.current.end;
  }, []);
  const entries = Object.entries(phases).filter(([phase]) => names.includes(phase)).map(([phase, meaning]) => [phase, phase, meaning]);
  if (names.includes("ready")) entries.push(["ready", "ready", "gradients can be sent"]);
  return html`<p>${first === last ? "Step " + figure(first) : "Steps " + figure(first) + " to " + figure(last)} of all workers, ${sayTime(length)} in all. Time goes from left to right. Every worker has a row for computing and one for exchanging gradients: the more of the exchange lies below computing, the less it costs.</p>
    ${notes.map((each) => html`<${Note}>${each}<//>`)}
    <div class="controls">${ZOOMS.map(([name, sign, label]) => html`<button type="button" class=${name} aria-label=${label} title=${label} onClick=${() => view.current.act(name)}>${sign}</button>`)}
      <span class="hint">drag, or use arrow keys, + and -</span></div>
    <div class="canvas-place" ref=${holder} tabindex="0" role="application" aria-label="Timeline: arrow keys move, plus and minus zoom"><canvas></canvas></div>
    <p class="readout" role="status" ref=${readout}></p><${Legend} entries=${entries}/>
    <${Note}>The files in <code>timeline/</code> hold the whole run. They are Chrome traces: Perfetto opens them.<//>`;
}

function timelineView(holder, say, { length, names, phases, ranks }) {
  const canvas = holder.querySelector("canvas"), pen = canvas.getContext("2d");
  const tops = [];
  let height = TOP;
  for (const each of ranks) {
    tops.push(height);
    height += each.lanes.length * ROW + GAP;
  }
  let begin = 0, end = length, width = 0, colours = {}, queued = 0, under = null, drag = null;

  function readColours() {
    colours = Object.fromEntries(["card", "ink", "muted", "rule", ...Object.keys(phases)].map((key) => [key, colourOf("", "--" + key)]));
    const tile = document.createElement("canvas"), t = tile.getContext("2d");
    tile.width = tile.height = 8;
    t.globalAlpha = 0.22;
    t.fillStyle = t.strokeStyle = colours.wait;
    t.fillRect(0, 0, 8, 8);
    t.globalAlpha = 1;
    t.lineWidth = 2;
    for (const shift of [-8, 0, 8]) { t.moveTo(shift, 8); t.lineTo(shift + 8, 0); }
    t.stroke();
    colours.wait = pen.createPattern(tile, "repeat");
  }

  const xOf = (time) => LABEL + (time - begin) / (end - begin) * (width - LABEL - 6);
  const timeAt = (x) => begin + (x - LABEL) / (width - LABEL - 6) * (end - begin);

  function paint() {
    queued = 0;
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
    ranks.forEach(({ rank, lanes }, index) => lanes.forEach((lane, i) => {
      pen.fillStyle = i ? colours.muted : colours.ink;
      pen.fillText(i ? lane : "worker " + rank, 6, tops[index] + (i + 0.5) * ROW);
    }));
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, 0, width - LABEL, height);
    pen.clip();
    ranks.forEach((each, index) => each.spans.forEach((span) => paintSpan(span, tops[index])));
    pen.restore();
  }

  function paintAxis() {
    const rough = (end - begin) / Math.max(2, width / 130), power = 10 ** Math.floor(Math.log10(rough));
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
    const x = xOf(start), y = top + lane * ROW + 1, word = names[name];
    if (x > width || xOf(start + long) < LABEL) return;
    const wide = long === 0 ? 1.5 : Math.max(0.7, xOf(start + long) - x - 0.5);
    pen.fillStyle = long === 0 ? colours.ink : colours[word] || colours.other;
    pen.fillRect(x, y, wide, ROW - 3);
    if (wide > 7 * word.length && word !== "wait") {
      pen.fillStyle = colours.card;
      pen.fillText(word, Math.max(x, LABEL) + 4, y + ROW / 2 - 1);
    }
  }

  function queue() { queued = queued || requestAnimationFrame(paint); }

  function look(from, to) {
    const span = Math.max(length / 5000, Math.min(length, to - from));
    begin = Math.max(0, Math.min(length - span, from));
    end = begin + span;
    queue();
    if (!under) say("Shown: " + sayTime(begin) + " to " + sayTime(end) + " of " + sayTime(length) + ".");
  }

  function zoom(factor, centre = (begin + end) / 2) { look(centre - (centre - begin) * factor, centre + (end - centre) * factor); }

  function pan(share) { look(begin + share * (end - begin), end + share * (end - begin)); }

  const acts = { in: () => zoom(0.6), out: () => zoom(1 / 0.6), left: () => pan(-0.3), right: () => pan(0.3), all: () => look(0, length) };
  const keys = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", 0: "all", Home: "all" };

  function find(x, y) {
    const time = timeAt(x), i = tops.findLastIndex((top) => y >= top);
    if (i < 0) return null;
    const lane = Math.floor((y - tops[i]) / ROW);
    const hit = ranks[i].spans.findLast((span) => span[1] === lane && span[2] <= time && time <= span[2] + span[3]);
    return hit ? [ranks[i].rank, hit] : null;
  }

  function point(event) {
    if (drag) {
      const shift = (drag.x - event.clientX) / (width - LABEL) * (drag.end - drag.begin);
      return look(drag.begin + shift, drag.end + shift);
    }
    const place = canvas.getBoundingClientRect();
    under = find(event.clientX - place.left, event.clientY - place.top);
    if (!under) return;
    const [rank, [name, , start, long, facts]] = under;
    say("Worker " + rank + ": " + names[name] + ", " + sayTime(long) + ", from " + sayTime(Math.max(0, start)) + (facts ? " (" + facts + ")" : "") + ".");
  }

  const on = (kind, act, options) => holder.addEventListener(kind, act, options);
  on("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    acts[keys[event.key]]();
  });
  on("pointerdown", (event) => {
    drag = { x: event.clientX, begin, end };
    holder.setPointerCapture(event.pointerId);
  });
  on("pointermove", point);
  for (const kind of ["pointerup", "pointercancel"]) on(kind, () => { drag = null; });
  on("pointerleave", () => { under = null; });
  on("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, timeAt(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });

  readColours();
  const forget = onRepaint(() => { readColours(); paint(); });
  const observer = new ResizeObserver(queue);
  observer.observe(holder);
  look(0, length);
  return { act: (name) => acts[name](), end: () => { forget(); observer.disconnect(); cancelAnimationFrame(queued); } };
}

// The page: what was recorded, section by section, and in the end what was not.
const SECTIONS = [
  ["learning", Learning, "How it learned", "Every curve counts each sample once, whichever worker had it. Samples per second are those of all workers, by the time that passed.", "nothing was recorded step by step, so there are no curves."],
  ["pipeline", Pipeline, "One batch, step by step", "Data parallelism: every worker has a copy of the model, computes on its part of the batch, and all copies get the same update.", html`no batch was recorded; <code>paceline run --trace-step 12</code> does that.`],
  ["workers", Workers, "Who worked, who waited", "All workers finish a step together, so each step takes as long as the slowest one.", "none has finished a step."],
  ["timeline", Timeline, "When it happened", "", html`when each worker did what was not recorded; <code>paceline run --timeline</code> does.`],
  ["scaling", Scaling, "What more workers bring", "", html`the job was not measured on several numbers of workers; <code>paceline scale</code> does.`],
  ["checkpoints", Checkpoints, "What was saved", "", "none was written."],
  ["details", Details, "Settings and messages", "", ""],
];

function Page({ data }) {
  const shown = SECTIONS.filter(([name]) => data[name]), absent = SECTIONS.filter(([name, , , , why]) => !data[name] && why);
  useLayoutEffect(() => { setStops(); root.dataset.ready = "true"; }, []);
  return html`<header class="top"><div class="top-inner"><span class="brand">Paceline</span>
      <nav aria-label="Sections"><ul>${["overview", ...shown.map((each) => each[0])].map((name) => html`<li><a href=${"#" + name}>${sentence(name)}</a></li>`)}</ul></nav><${Theme}/></div></header>
    <main id="main"><${Overview} data=${data}/>
      ${shown.map(([name, Panel, title, lead]) => html`<section id=${name} aria-labelledby=${name + "-title"}>
        <h2 id=${name + "-title"}>${title}</h2>${lead && html`<p class="lead">${lead}</p>`}<${Panel} data=${data[name]}/></section>`)}
      ${absent.length > 0 && html`<section id="absent" aria-labelledby="absent-title"><h2 id="absent-title">What was not recorded</h2>
        <ul>${absent.map(([name, , , , why]) => html`<li><b>${sentence(name)}</b>: ${why}</li>`)}</ul></section>`}</main>
    <footer><p>Made by paceline ${data.version} on ${moment(data.made)} from the folder <code>${data.folder}</code>. This file is complete: it needs no network and sends nothing.</p></footer>`;
}

// Tables that fit need no stop of their own on the way through the page by keyboard.
function setStops() {
  for (const box of document.querySelectorAll(".scroll")) {
    if (box.scrollWidth > box.clientWidth) box.setAttribute("tabindex", "0");
    else box.removeAttribute("tabindex");
  }
}

addEventListener("resize", setStops);
render(html`<${Page} data=${JSON.parse(document.getElementById("data").textContent)}/>`, document.getElementById("page"));
