// A chart: curves by uPlot, with a tip that follows the pointer and the arrow keys. Charts of one
// group share the crosshair and the zoom.

// Curves. Columns of a curve: x, mean, lowest, highest. rangeOf decides what is cut off.
const NEAR_PX = 40,
  LAYERS = 4;

// The lowest and highest value drawn, and the peak that is cut off so that the rest can be seen.
// A loss may fall from high up in its first steps: that is not a peak.
function rangeOf(curves, { zero = false, yLog = false, shown = null }) {
  const all = (column) =>
    curves.flatMap(({ columns }) =>
      shown
        ? columns[column].filter((_, i) => columns[0][i] >= shown[0] && columns[0][i] <= shown[1])
        : columns[column],
    );
  const means = all(1),
    xs = all(0),
    highs = all(3),
    rising = [...means].sort((a, b) => a - b);
  if (!means.length) return [0, 1, null];
  const begin = means.slice(0, means.length / 10 + 1).sort((a, b) => a - b);
  const usual = Math.max(begin[begin.length >> 1], rising[Math.floor((means.length - 1) * 0.97)]);
  let low = Math.min(...all(2).filter((each) => !yLog || each > 0)),
    high = Math.max(...highs),
    cut = null;
  if (yLog) return [low / 1.15, Math.max(high, low) * 1.15, null];
  if (means.length > 20 && high > usual + 3 * Math.max(usual - low, Math.abs(usual) * 1e-3)) {
    cut = [high, xs[highs.indexOf(high)]];
    high = Math.max(usual + 0.5 * (usual - low), usual * 1.1);
  }
  if (zero) low = Math.min(0, low);
  if (high > low) return [low, high + (high - low) * 0.05, cut];
  const margin = Math.abs(low) * 0.1 || 1;
  return [zero ? low : low - margin, high + margin, cut];
}

// Smoothing: a line fitted to the points around each, over so many thousandths of the curve. Centred, so
// that a falling curve is not delayed.
function smoothed(values, smoothing) {
  const reach = Math.max(2, Math.round((values.length * smoothing) / 1000)),
    weights = Array.from({ length: 2 * reach + 1 }, (_, i) =>
      Math.exp(-2 * ((i - reach) / reach) ** 2),
    );
  return values.map((_, at) => {
    let [w, x, xx, y, xy] = [0, 0, 0, 0, 0];
    for (let i = Math.max(0, at - reach); i <= Math.min(values.length - 1, at + reach); i++) {
      const weight = weights[i - at + reach],
        away = i - at;
      w += weight;
      x += weight * away;
      xx += weight * away * away;
      y += weight * values[i];
      xy += weight * away * values[i];
    }
    return (xx * y - x * xy) / (w * xx - x * x);
  });
}

const SMOOTHED_FROM = 20,
  SMOOTHING = 25,
  MOST_SMOOTHING = 100;
const isSmoothed = ({ smooth, columns }, smoothing) =>
  smooth && smoothing > 0 && columns[0].length >= SMOOTHED_FROM;

// In uPlot's format: for every curve the measured values, the band around them, and the smoothed line.
function layersOf(curves, yLog, smoothing) {
  const drawn = (column) => (yLog ? column.map((each) => (each > 0 ? each : null)) : column);
  return uPlot.join(
    curves.map((curve) => {
      const [xs, means, lows, highs] = curve.columns;
      const line = isSmoothed(curve, smoothing)
        ? smoothed(means, smoothing)
        : means.map(() => null);
      return [xs, ...[means, lows, highs, line].map(drawn)];
    }),
  );
}

const pale = (colour, share) => colour.replace(")", `, ${share})`).replace("rgb(", "rgba(");

function seriesOf({ look, dots, dash, bars, smooth }, now, smoothing) {
  const unseen = { width: 0, points: { show: false }, spanGaps: true };
  const measured = {
    stroke: () => (isSmoothed(now(), smoothing()) ? pale(colourOf(look), 0.4) : colourOf(look)),
    width: smooth ? 1.2 : 1.8,
    dash,
    spanGaps: true,
    points: {
      show: () => !bars && (dots || now().columns[0].length === 1),
      size: 7,
      fill: () => (dash ? colourOf("", "--card") : colourOf(look)),
    },
    ...(bars && {
      width: 0,
      fill: () => colourOf(look),
      paths: uPlot.paths.bars({ size: [0.9, 24] }),
    }),
  };
  return [
    measured,
    unseen,
    unseen,
    { stroke: () => colourOf(look), width: 2, points: { show: false }, spanGaps: true },
  ];
}

// Ends of epochs: a line through the curves and a number above them, as many as fit.
function drawTicks(plot, ticks) {
  const { ctx: pen, bbox } = plot,
    { min, max } = plot.scales.x,
    ratio = devicePixelRatio || 1;
  const inside = ticks.filter(([x]) => x > min && x <= max),
    apart = Math.ceil(inside.length / Math.max(1, bbox.width / (38 * ratio)));
  pen.save();
  pen.fillStyle = pen.strokeStyle = colourOf("", "--muted");
  pen.font = 10 * ratio + "px system-ui, sans-serif";
  pen.textBaseline = "bottom";
  pen.lineWidth = ratio;
  pen.setLineDash([2 * ratio, 3 * ratio]);
  inside
    .filter((_, i) => (i + 1) % apart === 0)
    .forEach(([x, number], i) => {
      const left = Math.round(plot.valToPos(x, "x", true));
      pen.globalAlpha = 0.5;
      pen.beginPath();
      pen.moveTo(left, bbox.top);
      pen.lineTo(left, bbox.top + bbox.height);
      pen.stroke();
      pen.globalAlpha = 1;
      pen.textAlign = i || left < bbox.left + 50 * ratio ? "center" : "right";
      pen.fillText(i ? number : "epoch " + number, left + (i ? 0 : 3 * ratio), bbox.top - ratio);
    });
  pen.restore();
}

function chartOptions({ curves, xLabel, group, log, yLog, marks, height }, now, on) {
  const stroke = () => colourOf("", "--muted"),
    grid = { stroke: () => colourOf("", "--rule"), width: 1 };
  const axis = {
    stroke,
    grid,
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    labelFont: "11px system-ui, sans-serif",
  };
  const bands = curves.map(({ look }, i) => ({
    series: [LAYERS * i + 3, LAYERS * i + 2],
    fill: () => pale(colourOf(look), 0.2),
  }));
  const beside = curves.some((curve) => curve.bars) ? 0.5 : 0;
  const splits = log ? powersOfTwo : yLog ? roundSteps : null;
  return {
    height,
    padding: [now().ticks ? 16 : 8, null, null, null],
    legend: { show: false },
    series: [
      {},
      ...curves.flatMap((curve, i) =>
        seriesOf(curve, () => now().curves[i], () => now().smoothing),
      ),
    ],
    bands,
    cursor: {
      y: false,
      points: { show: false },
      ...(group && { sync: { key: group, setSeries: false, scales: ["x", null] } }),
      drag: { x: xLabel === "step", y: false, setScale: false },
      bind: { dblclick: () => on.unzoom },
    },
    scales: {
      x: {
        time: false,
        distr: log ? 3 : 1,
        log: 2,
        range: (_, low, high) =>
          now().shown || (low < high ? [low - beside, high + beside] : [low - 1, high + 1]),
      },
      y: {
        distr: log || yLog ? 3 : 1,
        log: log ? 2 : 10,
        range: () => now().range.slice(0, 2),
      },
    },
    axes: [
      {
        ...axis,
        label: xLabel,
        labelSize: 16,
        size: 26,
        incrs: [1, 2, 5]
          .flatMap((n) => [...Array(13).keys()].map((p) => n * 10 ** p))
          .sort((a, b) => a - b),
        values: (_, at) => at.map((x) => figure(x)),
        ...(marks && { splits: () => now().marks }),
      },
      {
        ...axis,
        values: (_, at) => at.map((y) => (y === null ? "" : now().say(y))),
        size: (_, at) =>
          Math.max(34, 10 + 6.4 * Math.max(...(at || [""]).map((each) => each.length))),
        ...(splits && { splits: () => splits(...now().range) }),
      },
    ],
    hooks: {
      setCursor: [on.cursor],
      setSelect: [on.select],
      draw: [(plot) => drawTicks(plot, now().ticks || [])],
    },
  };
}

// Ticks of a logarithmic scale: 1, 2 and 5 of each power of ten, fewer on a long scale.
function roundSteps(low, high) {
  const powers = Math.log10(high / low),
    heads = powers > 4 ? [1] : powers > 1.5 ? [1, 5] : powers > 0.6 ? [1, 2, 5] : null;
  if (!heads) return [0, 1, 2, 3].map((i) => Number((low + ((high - low) * i) / 3).toPrecision(3)));
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    found.push(...heads.map((each) => each * 10 ** power));
  return found.filter((each) => each >= low && each <= high);
}

function powersOfTwo(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log2(low)); power <= Math.log2(high); power++)
    found.push(2 ** power);
  return found.filter((_, i) => i % (1 + (found.length >> 3)) === 0);
}

// The part of the axis that all charts of a group show; null means all of it.
const zooms = new Map(),
  zoomListeners = new Set();

function useZoom(group) {
  const [own, setOwn] = useState(null),
    [, redraw] = useState(0);
  useEffect(() => {
    const listen = () => redraw((count) => count + 1);
    zoomListeners.add(listen);
    return () => zoomListeners.delete(listen);
  }, []);
  if (!group) return [own, setOwn];
  const setShared = (shown) => {
    zooms.set(group, shown);
    for (const listen of zoomListeners) listen();
  };
  return [zooms.get(group) || null, setShared];
}

// The points of a chart as a file; curves need not have a point at the same x.
function saveCsv(title, xLabel, curves) {
  const quoted = (cell) => (/[",\n]/.test(cell) ? '"' + cell.replaceAll('"', '""') + '"' : cell),
    names = ["", " lowest", " highest"];
  const head = [xLabel, ...curves.flatMap(({ label }) => names.map((name) => label + name))],
    joined = uPlot.join(curves.map(({ columns }) => columns)),
    rows = joined[0].map((_, i) => joined.map((column) => column[i] ?? ""));
  const text = [head, ...rows].map((row) => row.map((cell) => quoted(String(cell))).join(","));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text.join("\n") + "\n"], { type: "text/csv" }));
  link.download = title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-") + ".csv";
  link.click();
  URL.revokeObjectURL(link.href);
}

function Chart({
  title,
  curves,
  say = figure,
  said = "",
  xLabel = "step",
  log = false,
  yLog = false,
  zero = false,
  marks = null,
  ticks = null,
  height = 212,
  range: fixed = null,
  legend = curves.length > 1,
  group = null,
  smoothing = SMOOTHING,
}) {
  const box = useRef(null),
    holder = useRef(null),
    tip = useRef(null),
    view = useRef(null),
    now = useRef({}),
    [shown, setShown] = useZoom(group);
  const range = fixed || rangeOf(curves, { zero, yLog, shown }),
    cut = range[2];
  now.current = { curves, say, range, marks, ticks, shown, smoothing };
  const shape = curves.map(({ look, label }) => [look, label]);
  const key = JSON.stringify([shape, log, yLog, height]);
  // A new plot is made only for other curves or another scale; new points are added to the existing one.
  useEffect(() => {
    const fixedOptions = { curves, xLabel, group, log, yLog, marks, height };
    view.current = chartView(fixedOptions, { box, holder, tip }, () => now.current, setShown);
    return view.current.end;
  }, [key]);
  const isNew = useRef(true);
  useEffect(() => {
    if (!isNew.current) view.current.draw();
    isNew.current = false;
  }, [curves, range[0], range[1], shown, smoothing]);
  const entries = curves
    .filter((curve) => !curve.unlisted)
    .map(({ look, label }) => [look, label]);
  const peak =
    cut && `A peak of ${say(cut[0])} near ${xLabel} ${figure(Math.round(cut[1]))} is cut off`;
  return html`<figure class="chart-box" ref=${box}>
    <figcaption>
      <strong>${title}</strong
      ><button
        type="button"
        class="csv"
        aria-label=${title + " as a CSV file"}
        onClick=${() => saveCsv(title, xLabel, curves)}
      >
        CSV</button
      >${legend && html`<${Legend} entries=${entries} />`}
    </figcaption>
    ${
      shown &&
      html`<button type="button" class="unzoom" onClick=${() => setShown(null)}>Show all</button>`
    }
    <div
      class="chart"
      ref=${holder}
      tabindex="0"
      role="img"
      aria-label=${title + ". " + said}
    ></div>
    <div class="tip" ref=${tip} hidden></div>
    <p class="said">${said}</p>
    ${cut && html`<${Note}>${peak}, so that the rest can be seen.<//>`}
  </figure>`;
}

// One plot, as long as its curves are the same: `now()` returns its current data.
function chartView(options, { box, holder, tip }, now, setShown) {
  const { xLabel, yLog, height } = options;
  const place = holder.current;
  const data = () => layersOf(now().curves, yLog, now().smoothing);
  const on = { cursor: showTip, select, unzoom: () => setShown(null) };
  const plot = new uPlot(
    { ...chartOptions(options, now, on), width: place.clientWidth },
    data(),
    place,
  );
  const fit = () => {
    const width = place.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height });
  };
  const observer = new ResizeObserver(fit);
  observer.observe(place);
  const forget = onRepaint(() => plot.redraw(false));
  let at = null;

  function hide() {
    tip.current.hidden = true;
  }

  function showTip(u) {
    const { idx, left } = u.cursor,
      { curves, say, ticks } = now();
    if (idx === null || idx === undefined || left < 0) return hide();
    at = idx;
    const near = curves
      .map(({ label, told }, i) => [label, told ? told[idx] : nearest(u, LAYERS * i + 1, idx)])
      .filter((each) => each[1] !== null);
    const x = u.data[0][idx],
      epoch = (ticks || []).find(([end]) => x <= end);
    tip.current.textContent =
      xLabel +
      " " +
      plain.format(Math.round(x)) +
      ": " +
      near.map(([label, value]) => (curves.length > 1 ? label + " " : "") + say(value)).join(", ") +
      (epoch ? " (epoch " + epoch[1] + ")" : "");
    tip.current.hidden = false;
    // Beside the curve, on the side where there is room.
    const inside = u.over.getBoundingClientRect(),
      around = box.current.getBoundingClientRect(),
      { offsetWidth: wide, offsetHeight: high } = tip.current;
    const value = near.length ? near[near.length - 1][1] : null,
      y = isNumber(value) ? u.valToPos(value, "y") : 0,
      hasRoom = left + 14 + wide <= inside.width,
      x0 = inside.left - around.left + (hasRoom ? left + 14 : left - 14 - wide);
    const top = Math.max(0, Math.min(inside.height - high, y - high / 2));
    tip.current.style.left = Math.max(0, Math.min(around.width - wide, x0)) + "px";
    tip.current.style.top = inside.top - around.top + top + "px";
  }

  function select(u) {
    const { left, width } = u.select;
    if (width < 8) return;
    zoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  // Shows the points between two places, at least two of them.
  function zoom(low, high) {
    const xs = plot.data[0],
      inside = xs.filter((x) => x >= low && x <= high).length;
    if (inside > 1) setShown(inside < xs.length ? [low, high] : null);
  }

  function scale(factor) {
    const { min, max } = plot.scales.x,
      here = at === null ? max : Math.max(min, Math.min(max, plot.data[0][at]));
    zoom(here - (here - min) * factor, here + (max - here) * factor);
  }

  function move(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = plot.data[0].length - 1,
      big = Math.max(1, Math.round(last / 20)),
      here = at === null ? last : at;
    const moves = {
      ArrowLeft: here - 1,
      ArrowRight: here + 1,
      PageUp: here - big,
      PageDown: here + big,
      Home: 0,
      End: last,
    };
    const zooms = { "+": 0.6, "=": 0.6, "-": 1 / 0.6 };
    if (event.key === "Escape") hide();
    if (event.key === "0") setShown(null);
    if (event.key in zooms && xLabel === "step") scale(zooms[event.key]);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(last, moves[event.key]));
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: 0 });
  }

  place.addEventListener("keydown", move);
  place.addEventListener("blur", hide);
  return {
    draw: () => plot.setData(data()),
    end: () => {
      observer.disconnect();
      forget();
      place.removeEventListener("keydown", move);
      place.removeEventListener("blur", hide);
      plot.destroy();
    },
  };
}

// The value of a curve near a place on the axis; curves need not have a point at the same x.
function nearest(plot, series, index) {
  const [xs, ys] = [plot.data[0], plot.data[series]],
    x = plot.valToPos(xs[index], "x");
  for (let apart = 0; apart < xs.length; apart++) {
    const close = [index - apart, index + apart].filter(
      (i) => Math.abs(plot.valToPos(xs[i], "x") - x) <= NEAR_PX,
    );
    if (!close.length) return null;
    const found = close.find((i) => isNumber(ys[i]));
    if (found !== undefined) return ys[found];
  }
  return null;
}
