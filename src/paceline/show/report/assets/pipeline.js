// One recorded step. A worker's parts are in that worker's column and colour; what belongs to all is as wide
// as the picture. So a batch that is split fans out, and outputs that are gathered come together. In an
// all-reduce every worker gets something from every other one.
const isNarrow = matchMedia("(max-width: 760px)").matches,
  COLUMNS = isNarrow ? 4 : 8,
  COLOURS = 6,
  WIDTH = 400;

function nounOf(trace) {
  return trace.engine === "DistributedDataParallel" ? "worker" : "replica";
}

function shapeOf({ name, shape, dtype, bytes: size }) {
  if (shape.length === 1) {
    const words = name.split(" "),
      nouns = ["row", "gradient", "weight"];
    return count(
      shape[0],
      nouns.find((noun) => words.some((word) => word.startsWith(noun))) || "value",
    );
  }
  if (shape.length) return shape.map((each) => figure(each)).join(" × ");
  return dtype ? "one number" : name + ", " + bytes(size);
}

function valuesOf(values) {
  return (
    values
      .slice(0, 3)
      .map((each) => figure(each))
      .join(", ") + (values.length > 3 ? " …" : "")
  );
}

function Contents({ first, stats }) {
  const range =
    stats && figure(stats.min) + " to " + figure(stats.max) + ", mean " + figure(stats.mean);
  return html`<span class="values"
    >${first && first.length ? valuesOf(first) : range || NOTHING}</span
  >`;
}

// The parts side by side, or the first ones and the number of others.
function columnsOf({ title, parts, parts_in_all: inAll }) {
  const shown =
    inAll > COLUMNS
      ? parts.slice(0, COLUMNS - 1)
      : parts.length
        ? parts
        : [{ title, worker: null, tensors: [], text: "" }];
  const columns = shown.map((part) => ({
    ...part,
    look: part.worker === null ? "all" : "worker" + (part.worker % COLOURS),
  }));
  if (inAll > COLUMNS)
    columns.push({
      title: "… " + figure(inAll - COLUMNS + 1) + " more",
      look: "more",
      tensors: [],
      text: "alike",
    });
  return columns;
}

// Every worker fills its own buckets in the same way, so a recording has them only once.
function rowsOf({ stages, workers }) {
  const rows = [];
  for (const stage of stages) {
    const isShared =
      stage.name === "buckets" &&
      workers > 1 &&
      rows.length &&
      stage.parts.every((part) => part.worker === null);
    const own = { tensors: stage.parts.flatMap((part) => part.tensors), seconds: null };
    rows.push(
      isShared
        ? rows[rows.length - 1].map((part) => (part.look === "more" ? part : { ...part, ...own }))
        : columnsOf(stage),
    );
  }
  return rows;
}

// A small rectangle whose sides follow rows and columns.
function Glyph({ shape, mostRows }) {
  if (shape.length < 2 || shape.includes(0)) return null;
  const wide = shape.slice(1).reduce((a, b) => a * b, 1),
    side = (share, most) => Math.max(3, most * Math.sqrt(Math.min(1, share)));
  const width = side(wide / 100, 46),
    height = side(shape[0] / mostRows, 50);
  return html`<svg width=${width} height=${height} aria-hidden="true">
    <rect width=${width} height=${height} rx="1.5" class="tensor fill" />
  </svg>`;
}

function Box({ part, mostRows, isFollowed, isMarked }) {
  const [first, ...others] = part.tensors;
  const isSingle = first && first.first && first.first.length && !first.shape.length;
  const shown = first ? (isSingle ? figure(first.first[0]) : shapeOf(first)) : part.text;
  const took = isNumber(part.seconds) && duration(part.seconds);
  const small = others.length ? "and " + others.length + " more" : took;
  return html`<div class=${"box look-" + part.look + (isMarked ? " marked" : "")}>
    ${first && html`<${Glyph} shape=${first.shape} mostRows=${mostRows} />`}
    <div>
      <b>${part.title}</b>${shown && html`<code>${shown}</code>`}
      ${small && html`<small>${small}</small>`}
    </div>
    ${isFollowed && html`<span class="followed" aria-hidden="true">●</span>`}
  </div>`;
}

// What is where at a stage; those are marked whose shape begins with one in `mark`.
function Boxes({ trace, stage, row, mostRows, mark = [] }) {
  const stops = trace.sample ? trace.sample.stops : [];
  return html`<div class="boxes">
    ${row.map((part) => {
      const shape = part.tensors.length ? shapeOf(part.tensors[0]).replaceAll("×", "x") : "",
        isMarked = mark.some((each) => shape.startsWith(each)),
        isFollowed = stops.some(
          (stop) => stop.stage === stage.name && stop.worker === part.worker,
        );
      return html`<${Box} ...${{ part, mostRows, isFollowed, isMarked }} />`;
    })}
  </div>`;
}

// Lines from each box of a row to each of the next; between equal columns straight down, unless all
// are joined.
const middleOf = (index, row) => ((index + 0.5) / row.length) * WIDTH;

function Joins({ above, below, joinsAll }) {
  const isStraight = above.length === below.length && !joinsAll;
  const pairs = above
    .flatMap((from, i) => below.map((to, j) => [from, i, to, j]))
    .filter(([, i, , j]) => !isStraight || i === j);
  return html`<svg
    class="joins"
    viewBox=${"0 0 " + WIDTH + " 26"}
    preserveAspectRatio="none"
    aria-hidden="true"
  >
    ${pairs.map(([from, i, to, j]) => {
      const a = middleOf(i, above),
        b = middleOf(j, below),
        isShared = ["all", "more"].includes(from.look);
      return html`<g class=${"look-" + (isShared ? to : from).look}>
        <path class="join stroke" d=${"M" + a + " 0C" + a + " 13 " + b + " 13 " + b + " 21"} /><path
          class="fill"
          d=${"M" + b + " 26l-4 -7h8z"}
      /></g>`;
    })}
  </svg>`;
}

function Rest({ row }) {
  return html`<svg
    class="rest"
    viewBox=${"0 0 " + WIDTH + " 10"}
    preserveAspectRatio="none"
    aria-hidden="true"
  >
    ${row.map(
      ({ look }, i) =>
        html`<path class=${"join stroke look-" + look} d=${"M" + middleOf(i, row) + " 0V10"} />`,
    )}
  </svg>`;
}

function Followed({ trace, stage }) {
  const here = (followed) =>
    (followed ? followed.stops : []).filter((stop) => stop.stage === stage.name).slice(0, COLUMNS);
  const noun = nounOf(trace),
    { sample, weight } = trace;
  const rows = here(sample).map(
    ({ worker, row, values }) =>
      "row " +
      row +
      (worker === null ? "" : " of " + noun + " " + worker) +
      (values && values.length ? ": " + valuesOf(values) : ""),
  );
  const values = here(weight).map(({ what, by_worker: by, is_equal: equal }) => {
    const said = (by || [])
      .slice(0, COLUMNS)
      .map((value, n) => figure(value, 6) + (by.length > 1 ? " on " + noun + " " + n : ""));
    return (
      what +
      ": " +
      (said.join(", ") || "not recorded") +
      (equal === null ? "" : equal ? " (the same bits everywhere)" : " (not the same!)")
    );
  });
  const sign = (mark) => html`<span class="followed-sign" aria-hidden="true">${mark}</span>`;
  const number = sample && "The followed sample (number " + figure(sample.index) + ") is ";
  const name = weight && weight.name + "[" + weight.index.join(", ") + "]";
  return html`${rows.length > 0 && html`<p>${sign("●")} ${number + rows.join("; ")}.</p>`}
  ${
    values.length > 0 &&
    html`<p>${sign("◆")} The followed weight <code>${name}</code> has ${values.join("; ")}.</p>`
  }`;
}

function Parts({ stage }) {
  const rows = stage.parts.flatMap((part) =>
    part.tensors.map((tensor) => [
      part.title,
      html`<code>${tensor.name}</code>`,
      html`<span class="keep">${shapeOf(tensor)}</span>`,
      tensor.dtype.replace("torch.", ""),
      tensor.device,
      html`<${Contents} ...${tensor} />`,
      bytes(tensor.bytes),
    ]),
  );
  const said = stage.parts.filter((part) => part.text);
  if (!rows.length)
    return (
      said.length > 1 &&
      html`<ul>
        ${said.map((part) => html`<li>${part.title}: ${part.text}</li>`)}
      </ul>`
    );
  const head = ["where", "tensor", "shape", "type", "device", "values", "size"];
  return html`<${Table}
      caption=${sentence(stage.title) + ": what is where"}
      head=${head}
      rows=${rows.slice(0, 16)}
      words=${[0, 1, 2, 3, 4, 5]}
    />
    ${more(Math.min(rows.length, 16), Math.max(rows.length, stage.parts_in_all), "part")}`;
}

function StageWords({ stage, number }) {
  const facts = [
    stage.bytes_moved ? bytes(stage.bytes_moved) + " moved" : "",
    isNumber(stage.seconds) ? "took " + duration(stage.seconds) : "",
  ].filter(Boolean);
  return html`<div class="stage-words">
    <h3><span class="ordinal">${number}</span>${sentence(stage.title)}</h3>
    <p>${stage.text}</p>
    ${facts.length > 0 && html`<p class="facts">${facts.join(" · ")}</p>`}
  </div>`;
}

// One stage at a time; the others stay visible without their details.
function Stepper({ trace }) {
  const { stages } = trace,
    last = stages.length - 1;
  const [now, setNow] = useState(0),
    [everything, setEverything] = useState(false),
    list = useRef(null);
  const moved = useRef(false);
  const go = (index) => {
    moved.current = true;
    setNow(Math.max(0, Math.min(last, index)));
  };
  useEffect(() => {
    if (moved.current) list.current.children[now].scrollIntoView({ block: "nearest" });
  }, [now]);
  const onKey = (event) => {
    if (event.target.closest(".scroll") || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = {
      ArrowLeft: now - 1,
      ArrowUp: now - 1,
      ArrowRight: now + 1,
      ArrowDown: now + 1,
      Home: 0,
      End: last,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    go(moves[event.key]);
  };
  const firsts = stages
    .flatMap((stage) => stage.parts.flatMap((part) => part.tensors.slice(0, 1)))
    .filter((tensor) => tensor.shape.length);
  const mostRows = Math.min(
    Math.max(1, ...firsts.map((tensor) => tensor.shape[0])),
    4 * Math.max(1, trace.batch_rows),
  );
  const rows = rowsOf(trace),
    place = `Stage ${now + 1} of ${stages.length}`;
  return html`<div
    class=${"stepper" + (everything ? "" : " stepping")}
    tabindex="0"
    role="group"
    aria-label="One batch, stage by stage"
    onKeyDown=${onKey}
  >
    <div class="controls">
      <${Steps} names=${["Back", "Next"]} ...${{ place, now, last, go }} />
      <button
        type="button"
        class="all"
        aria-pressed=${String(everything)}
        onClick=${() => setEverything(!everything)}
      >
        Show all stages
      </button>
      <span class="hint">or use the arrow keys</span>
    </div>
    <ol class="stages" ref=${list}>
      ${stages.map(
        (stage, i) =>
          html`<li
            class=${"stage" + (i === now ? " now" : i > now ? " later" : "")}
            aria-current=${i === now ? "step" : null}
            onClick=${() => {
              if (i !== now && !String(getSelection())) setNow(i);
            }}
          >
            <${StageWords} stage=${stage} number=${i + 1} />
            <div class="stage-picture">
              ${
                i > 0 &&
                html`<${Joins}
                  above=${rows[i - 1]}
                  below=${rows[i]}
                  joinsAll=${stage.name === "all-reduce"}
                />`
              }
              <${Boxes} ...${{ trace, stage, mostRows }} row=${rows[i]} />
              ${i < last && html`<${Rest} row=${rows[i]} />`}
            </div>
            <div class="details">
              <${Followed} ...${{ trace, stage }} /><${Parts} stage=${stage} />
            </div>
          </li>`,
      )}
    </ol>
  </div>`;
}

const HOW_CHECKED =
  "The same step was computed again in one process on the whole batch, and compared.";

function Check({ trace, check }) {
  const [sign, look] =
    check.is_same === null ? [NOTHING, "open"] : check.is_same ? ["✓", "good"] : ["✗", "bad"];
  const equal =
    check.is_equal_on_all === null
      ? ""
      : "; all " +
        nounOf(trace) +
        "s ended with " +
        (check.is_equal_on_all ? "the same" : "not the same") +
        " bits";
  const said = sentence(check.text) + equal;
  return html`<div class=${"verdict " + look}>
    <p><span class="sign" aria-hidden="true">${sign} </span><strong>${said}</strong></p>
    ${check.how === "whole batch" && html`<${Note}>${HOW_CHECKED}<//>`}
    ${check.reason && html`<${Note}>${check.reason}<//>`}
  </div>`;
}

function Prediction({ index, input, layers, layers_in_all: inAll, answer }) {
  const row = (name, kind, output, weights) => [
    html`<code>${name}</code>`,
    kind,
    html`<span class="keep">${shapeOf(output)}</span>`,
    html`<${Contents} ...${output} />`,
    figure(weights || null),
  ];
  const rows = [
    ...input.slice(0, 4).map((tensor) => row(tensor.name, "input", tensor, 0)),
    ...layers.map((layer) =>
      row(layer.name || "(model)", layer.kind, layer.output, layer.parameters),
    ),
  ];
  return html`<h3>One sample through the trained model</h3>
    <p>Sample ${figure(index)} goes through every layer to the answer.</p>
    <${Table}
      caption="Prediction for one sample, layer by layer"
      head=${["layer", "what it is", "output", "values", "weights"]}
      rows=${rows}
      words=${[0, 1, 2, 3]}
    />
    ${more(layers.length, inAll, "layer")}
    ${answer && html`<p><strong>${sentence(answer.text)}</strong></p>`}`;
}

function Training({ epochs, observation }) {
  const head = ["epoch", "loss", "accuracy", "held-out accuracy", "time", "what the numbers say"];
  const rows = epochs.map((row) => [
    figure(row.epoch),
    figure(row.loss),
    percent(row.accuracy),
    percent(row.evaluation_accuracy),
    row.epoch ? duration(row.seconds) : "–",
    row.observation,
  ]);
  return html`<h3>The epochs after it</h3>
    <p>${observation}</p>
    <${Table} caption="Epochs of the trace" head=${head} rows=${rows} words=${[0, 5]} />`;
}

function aboutOf({ step, batch_rows, model, workers, engine }) {
  const what = count(batch_rows, "row") + " through " + model.name;
  const where = count(workers, nounOf({ engine })) + ", with " + engine;
  const weights = count(model.parameters, "weight");
  const when = "A real step, as it was recorded (step " + figure(step) + ")";
  return `${when}: ${what} (${weights}) on ${where}.`;
}

// A whole recording; `children` are shown after its stages.
function Recording({ trace, children }) {
  return html`${trace.check && html`<${Check} trace=${trace} check=${trace.check} />`}
  ${trace.stages.length > 0 && html`<${Stepper} trace=${trace} />`}
  ${children}
  ${trace.training && html`<${Training} ...${trace.training} />`}
  ${trace.prediction && html`<${Prediction} ...${trace.prediction} />`}`;
}

function Pipeline({ data }) {
  return data.map(
    (trace) =>
      html`${data.length > 1 && html`<h3>Step ${figure(trace.step)}</h3>`}
        <p>${aboutOf(trace)}</p>
        <${Recording} trace=${trace} />`,
  );
}
