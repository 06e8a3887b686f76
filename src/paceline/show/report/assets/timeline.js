// Timeline: the spans of some steps on a canvas that can be zoomed and moved.
const ROW = 18,
  GAP = 10,
  TOP = 22,
  LABEL = 84;
const ZOOMS = [
  ["out", "\u2212", "Zoom out"],
  ["in", "+", "Zoom in"],
  ["left", "◀", "Earlier"],
  ["right", "▶", "Later"],
  ["all", "All", "All of the window"],
];

function sayTime(us) {
  return us < 1e-6 ? "0" : duration(us / 1e6);
}

function Timeline({ data }) {
  const {
      steps: [first, last],
      length,
      names,
      phases,
      notes,
    } = data,
    view = useRef(null);
  const holder = useRef(null),
    readout = useRef(null);
  useEffect(() => {
    view.current = timelineView(
      holder.current,
      (text) => {
        readout.current.textContent = text;
      },
      data,
    );
    return view.current.end;
  }, [data]);
  const entries = Object.entries(phases)
    .filter(([phase]) => names.includes(phase))
    .map(([phase, meaning]) => [phase, phase, meaning]);
  if (names.includes("ready")) entries.push(["ready", "ready", "gradients can be sent"]);
  const steps = figure(first) + (first === last ? "" : " to " + figure(last));
  const shown = (first === last ? "Step " : "Steps ") + steps;
  return html`<p>
      ${shown} of all workers, ${sayTime(length)} in all. Time goes from left to right. Every worker
      has a row for computing and one for exchanging gradients: the more of the exchange lies below
      computing, the less it costs.
    </p>
    ${notes.map((each) => html`<${Note}>${each}<//>`)}
    <div class="controls">
      ${ZOOMS.map(([name, sign, label]) => {
        const act = () => view.current.act(name);
        const names = { class: name, "aria-label": label, title: label };
        return html`<button type="button" ...${names} onClick=${act}>${sign}</button>`;
      })}
      <span class="hint">drag, or use arrow keys, + and -</span>
    </div>
    <div
      class="canvas-place"
      ref=${holder}
      tabindex="0"
      role="application"
      aria-label="Timeline: arrow keys move, plus and minus zoom"
    >
      <canvas></canvas>
    </div>
    <p class="readout" role="status" ref=${readout}></p>
    <${Legend} entries=${entries} />
    <${Note}
      >The files in <code>timeline/</code> have the whole run. They are Chrome traces: Perfetto
      opens them.<//
    >`;
}

function timelineView(holder, say, { length, names, phases, ranks }) {
  const canvas = holder.querySelector("canvas"),
    pen = canvas.getContext("2d");
  const tops = [];
  let height = TOP;
  for (const each of ranks) {
    tops.push(height);
    height += each.lanes.length * ROW + GAP;
  }
  let begin = 0,
    end = length,
    width = 0,
    hatch = null,
    queued = 0,
    under = null,
    drag = null;

  const colour = (name) => colourOf("", "--" + name);

  function drawHatch() {
    const tile = document.createElement("canvas"),
      t = tile.getContext("2d");
    tile.width = tile.height = 8;
    t.globalAlpha = 0.22;
    t.fillStyle = t.strokeStyle = colour("wait");
    t.fillRect(0, 0, 8, 8);
    t.globalAlpha = 1;
    t.lineWidth = 2;
    for (const shift of [-8, 0, 8]) {
      t.moveTo(shift, 8);
      t.lineTo(shift + 8, 0);
    }
    t.stroke();
    hatch = pen.createPattern(tile, "repeat");
  }

  const xOf = (time) => LABEL + ((time - begin) / (end - begin)) * (width - LABEL - 6);
  const timeAt = (x) => begin + ((x - LABEL) / (width - LABEL - 6)) * (end - begin);

  function paint() {
    queued = 0;
    const ratio = devicePixelRatio || 1;
    width = holder.clientWidth;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = colour("card");
    pen.fillRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    paintAxis();
    ranks.forEach(({ rank, lanes }, index) =>
      lanes.forEach((lane, i) => {
        pen.fillStyle = colour(i ? "muted" : "ink");
        pen.fillText(i ? lane : "worker " + rank, 6, tops[index] + (i + 0.5) * ROW);
      }),
    );
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, 0, width - LABEL, height);
    pen.clip();
    ranks.forEach((each, index) => each.spans.forEach((span) => paintSpan(span, tops[index])));
    pen.restore();
  }

  function paintAxis() {
    const rough = (end - begin) / Math.max(2, width / 130),
      power = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map((u) => u * power).find((u) => u >= rough);
    pen.textAlign = "center";
    for (let mark = Math.ceil(begin / unit) * unit; mark <= end; mark += unit) {
      const x = Math.round(xOf(mark)) + 0.5;
      if (x < LABEL + 12) continue;
      pen.fillStyle = colour("rule");
      pen.fillRect(x, TOP - 5, 1, height);
      pen.fillStyle = colour("muted");
      if (x < width - 24) pen.fillText(sayTime(mark), x, 9);
    }
    pen.textAlign = "left";
  }

  function paintSpan([name, lane, start, long], top) {
    const x = xOf(start),
      y = top + lane * ROW + 1,
      word = names[name];
    if (x > width || xOf(start + long) < LABEL) return;
    const wide = long === 0 ? 1.5 : Math.max(0.7, xOf(start + long) - x - 0.5);
    const look = long === 0 ? "ink" : word in phases ? word : "other";
    pen.fillStyle = look === "wait" ? hatch : colour(look);
    pen.fillRect(x, y, wide, ROW - 3);
    if (wide > 7 * word.length && word !== "wait") {
      pen.fillStyle = colour("card");
      pen.fillText(word, Math.max(x, LABEL) + 4, y + ROW / 2 - 1);
    }
  }

  function queue() {
    queued = queued || requestAnimationFrame(paint);
  }

  function look(from, to) {
    const span = Math.max(length / 5000, Math.min(length, to - from));
    begin = Math.max(0, Math.min(length - span, from));
    end = begin + span;
    queue();
    if (!under)
      say("Shown: " + sayTime(begin) + " to " + sayTime(end) + " of " + sayTime(length) + ".");
  }

  function zoom(factor, centre = (begin + end) / 2) {
    look(centre - (centre - begin) * factor, centre + (end - centre) * factor);
  }

  function pan(share) {
    look(begin + share * (end - begin), end + share * (end - begin));
  }

  const acts = {
    in: () => zoom(0.6),
    out: () => zoom(1 / 0.6),
    left: () => pan(-0.3),
    right: () => pan(0.3),
    all: () => look(0, length),
  };
  const keys = {
    ArrowLeft: "left",
    ArrowRight: "right",
    "+": "in",
    "=": "in",
    "-": "out",
    0: "all",
    Home: "all",
  };

  function find(x, y) {
    const time = timeAt(x),
      i = tops.findLastIndex((top) => y >= top);
    if (i < 0) return null;
    const lane = Math.floor((y - tops[i]) / ROW);
    const hit = ranks[i].spans.findLast(
      (span) => span[1] === lane && span[2] <= time && time <= span[2] + span[3],
    );
    return hit ? [ranks[i].rank, hit] : null;
  }

  function point(event) {
    if (drag) {
      const shift = ((drag.x - event.clientX) / (width - LABEL)) * (drag.end - drag.begin);
      return look(drag.begin + shift, drag.end + shift);
    }
    const place = canvas.getBoundingClientRect();
    under = find(event.clientX - place.left, event.clientY - place.top);
    if (!under) return;
    const [rank, [name, , start, long, facts]] = under;
    say(
      "Worker " +
        rank +
        ": " +
        names[name] +
        ", " +
        sayTime(long) +
        ", from " +
        sayTime(Math.max(0, start)) +
        (facts ? " (" + facts + ")" : "") +
        ".",
    );
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
  for (const kind of ["pointerup", "pointercancel"])
    on(kind, () => {
      drag = null;
    });
  on("pointerleave", () => {
    under = null;
  });
  on(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(
        event.deltaY > 0 ? 1.2 : 1 / 1.2,
        timeAt(event.clientX - canvas.getBoundingClientRect().left),
      );
    },
    { passive: false },
  );

  drawHatch();
  const forget = onRepaint(() => {
    drawHatch();
    paint();
  });
  const observer = new ResizeObserver(queue);
  observer.observe(holder);
  look(0, length);
  return {
    act: (name) => acts[name](),
    end: () => {
      forget();
      observer.disconnect();
      cancelAnimationFrame(queued);
    },
  };
}
