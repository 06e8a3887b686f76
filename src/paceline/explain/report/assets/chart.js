// A chart: curves by uPlot, with a tip that follows the pointer and the arrow keys.

// Curves. Columns of a curve: x, mean, lowest, highest. See rangeOf for what is cut off.
const NEAR_PX = 40;

// The lowest and highest value drawn, and the peak that is cut off so that the rest can be seen.
// A loss may fall from high up in its first steps: that is not a peak.
function rangeOf(curves, zero) {
  const all = (column) => curves.flatMap((curve) => curve.columns[column]);
  const means = all(1),
    xs = all(0),
    highs = all(3),
    rising = [...means].sort((a, b) => a - b);
  const begin = means.slice(0, means.length / 10 + 1).sort((a, b) => a - b);
  const usual = Math.max(begin[begin.length >> 1], rising[Math.floor((means.length - 1) * 0.97)]);
  let low = Math.min(...all(2)),
    high = Math.max(...highs),
    cut = null;
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
  const stroke = () => colourOf("", "--muted"),
    grid = { stroke: () => colourOf("", "--rule"), width: 1 };
  const axis = {
    stroke,
    grid,
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    labelFont: "11px system-ui, sans-serif",
  };
  const series = curves.flatMap(({ look, dots, dash, columns }) => [
    {
      stroke: () => colourOf(look),
      width: 1.8,
      dash,
      spanGaps: true,
      points: {
        show: dots || columns[0].length === 1,
        size: 7,
        fill: () => (dash ? colourOf("", "--card") : colourOf(look)),
      },
    },
    { width: 0, points: { show: false }, spanGaps: true },
    { width: 0, points: { show: false }, spanGaps: true },
  ]);
  const bands = curves.map(({ look }, i) => ({
    series: [3 * i + 3, 3 * i + 2],
    fill: () => colourOf(look).replace(")", ", 0.22)").replace("rgb(", "rgba("),
  }));
  return {
    width: 300,
    height,
    legend: { show: false },
    series: [{}, ...series],
    bands,
    cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
    scales: {
      x: {
        time: false,
        distr: log ? 3 : 1,
        log: 2,
        range: (_, low, high) => (low < high ? [low, high] : [low - 1, high + 1]),
      },
      y: { distr: log ? 3 : 1, log: 2, range: range.slice(0, 2) },
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
        ...(marks && { splits: () => marks }),
      },
      {
        ...axis,
        values: (_, at) => at.map((y) => (y === null ? "" : say(y))),
        size: (_, at) =>
          Math.max(34, 10 + 6.4 * Math.max(...(at || [""]).map((each) => each.length))),
        ...(log && { splits: () => powersOfTwo(...range) }),
      },
    ],
    hooks: { setCursor: [onCursor] },
  };
}

function powersOfTwo(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log2(low)); power <= Math.log2(high); power++)
    found.push(2 ** power);
  return found.filter((_, i) => i % (1 + (found.length >> 3)) === 0);
}

function Chart({
  title,
  curves,
  say = figure,
  said = "",
  xLabel = "step",
  log = false,
  zero = false,
  marks = null,
  height = 212,
}) {
  const box = useRef(null),
    holder = useRef(null),
    tip = useRef(null);
  const range = rangeOf(curves, zero),
    cut = range[2];
  useEffect(() => {
    const plot = new uPlot(
      chartOptions({ curves, say, range, xLabel, log, marks, height }, showTip),
      uPlot.join(curves.map((curve) => curve.columns)),
      holder.current,
    );
    const fit = () => plot.setSize({ width: holder.current.clientWidth, height });
    const observer = new ResizeObserver(fit);
    observer.observe(holder.current);
    const forget = onRepaint(() => plot.redraw(false));
    let at = plot.data[0].length - 1;

    function hide() {
      tip.current.hidden = true;
    }

    function showTip(u) {
      const { idx, left } = u.cursor;
      if (idx === null || idx === undefined || left < 0) return hide();
      at = idx;
      const near = curves
        .map(({ label }, i) => [label, nearest(u, 3 * i + 1, idx)])
        .filter((each) => each[1] !== null);
      tip.current.textContent =
        xLabel +
        " " +
        Math.round(u.data[0][idx]).toLocaleString("en") +
        ": " +
        near
          .map(([label, value]) => (curves.length > 1 ? label + " " : "") + say(value))
          .join(", ");
      tip.current.hidden = false;
      const place = u.over.getBoundingClientRect(),
        around = box.current.getBoundingClientRect();
      const x = place.left - around.left + left - tip.current.offsetWidth / 2;
      tip.current.style.left =
        Math.max(0, Math.min(around.width - tip.current.offsetWidth, x)) + "px";
      tip.current.style.top = place.top - around.top - tip.current.offsetHeight + 8 + "px";
    }

    function move(event) {
      const last = plot.data[0].length - 1,
        big = Math.max(1, Math.round(last / 20));
      const moves = {
        ArrowLeft: at - 1,
        ArrowRight: at + 1,
        PageUp: at - big,
        PageDown: at + big,
        Home: 0,
        End: last,
      };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      const index = Math.max(0, Math.min(last, moves[event.key]));
      plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: 0 });
    }

    holder.current.addEventListener("keydown", move);
    holder.current.addEventListener("blur", hide);
    fit();
    return () => {
      observer.disconnect();
      forget();
      plot.destroy();
    };
  }, []);
  const entries = curves.map(({ look, label }) => [look, label]);
  const peak =
    cut && `A peak of ${say(cut[0])} near ${xLabel} ${figure(Math.round(cut[1]))} is cut off`;
  return html`<figure class="chart-box" ref=${box}>
    <figcaption>
      <strong>${title}</strong>${curves.length > 1 && html`<${Legend} entries=${entries} />`}
    </figcaption>
    <div
      class="chart"
      ref=${holder}
      tabindex="0"
      role="img"
      aria-label=${title + ". " + said}
    ></div>
    <div class="tip" role="status" ref=${tip} hidden></div>
    <p class="said">${said}</p>
    ${cut && html`<${Note}>${peak}, so that the rest can be seen.<//>`}
  </figure>`;
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
