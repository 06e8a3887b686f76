// The live page: the report's page, preceded by panels for a running training, and drawn again whenever
// the server sends news. A panel is drawn again only if its part of the document has changed.

const query = new URLSearchParams(location.search);
const RETRY_MS = 2000,
  COMPARE_MS = 3000,
  COMPARED_LIMIT = 6,
  FIRST_SECTIONS = 2;

function addressOf(path, run = query.get("run")) {
  const asked = new URLSearchParams({ token: query.get("token") || "" });
  if (run) asked.set("run", run);
  return path + "?" + asked;
}

// The head: what is running, how far it is, and for how long.
const ENDED = ["finished", "stopped", "failed", "killed"];
const sayState = (state, { late_s: late } = {}) =>
  ({ stopped: "stopped early", lost: "not connected", late: "last step " + clock(late) + " ago" })[
    state
  ] || state;

// Why a page gets no more news, and what to do.
const LOST = {
  silent: "The server of this page does not answer: it has ended, or its machine cannot be reached.",
  other:
    "The server of this page was started again and has another token: open the address that it " +
    "printed. With --port and --token-file it keeps its address, and this page continues.",
};

function Progress({ share }) {
  return html`<svg
    class="progress"
    viewBox="0 0 1000 10"
    preserveAspectRatio="none"
    role="img"
    aria-label=${percent(share) + " done"}
  >
    <rect width="1000" height="10" class="rest-of-it" />
    <rect width=${1000 * Math.min(1, share)} height="10" class="done" />
  </svg>`;
}

function lastOf(learning, name) {
  const chart = ((learning && learning.charts) || []).find((each) => each.name === name);
  if (!chart) return null;
  const [xs, means] = chart.curves[0].columns;
  return [means[means.length - 1], xs[xs.length - 1]];
}

// The number of live workers: current, last known, or unknown.
function aliveTile({ alive, workers_in_all: all, state, silent_s: silent, t }, isLost) {
  const known = isNumber(alive) ? figure(alive) + " of " + figure(all) : NOTHING;
  if (isLost) return ["workers alive", NOTHING, known + " at " + timeOf(t)];
  if (state !== "silent") return ["workers alive", known, ""];
  return ["workers alive", known, (isNumber(alive) ? "silent for " : "last seen ") + clock(silent) + (isNumber(alive) ? "" : " ago")];
}

function liveTiles({ live, loss, isLost }) {
  const of = (now, all) => figure(now) + (isNumber(all) ? " of " + figure(all) : ""),
    perStep = isNumber(live.steps_per_s) ? figure(live.steps_per_s) + " steps/s" : "";
  const epoch = isNumber(live.epochs) ? Math.min(live.epoch + 1, live.epochs) : live.epoch + 1;
  return [
    ["epoch", of(epoch, live.epochs), perEpoch(live)],
    ["step", figure(live.step), isNumber(live.steps) ? "of " + figure(live.steps) : ""],
    ["time left", live.eta_s === null || isLost ? NOTHING : clock(live.eta_s), timeNote(live)],
    ["samples/s", figure(live.samples_per_s), perStep],
    aliveTile(live, isLost),
    ["training loss", figure(loss && loss[0]), loss ? "near step " + figure(Math.round(loss[1])) : ""],
  ];
}

const timeNote = ({ late_s: late, elapsed_s: elapsed }) =>
  late ? "no step for " + clock(late) : clock(elapsed) + " so far";
const perEpoch = ({ steps_per_epoch: steps }) => (isNumber(steps) ? count(steps, "step") + " each" : "");

// Whole seconds, so that text that changes four times a second keeps its width.
const clock = (seconds) => (isNumber(seconds) ? duration(Math.max(1, Math.round(seconds))) : NOTHING);

function LiveHead({ data }) {
  const { live, isLost } = data, // isLost: false, or why
    isOver = ENDED.includes(live.state),
    state = stateOf(live, isLost);
  const late =
    "The last step was " + clock(live.late_s) + " ago, longer than ten usual steps: the run " +
    "evaluates, saves, or hangs. A worker that makes no progress reports it under \"Messages and output\".";
  const silence =
    "Nothing was written for " + clock(live.silent_s) + ": the run hangs, was killed, or its disk is full.";
  return html`<section id="overview" aria-label="Overview">
    <div class="headline">
      <h1>${data.name}</h1>
      <span class=${"badge " + state} role="status">${sayState(state, live)}</span>
      <${Notify} ...${{ live, name: data.name }} />
      <a class="button save" href=${addressOf("/report")} download>Save as report.html</a>
    </div>
    <${Story}
      data=${isOver ? data : { sentences: data.sentences.slice(0, 1) }}
      state=${isOver ? live.state : "running"}
    />
    ${
      isLost &&
      html`<p class="verdict bad">
        ${LOST[isLost]} The page shows the last state, from ${timeOf(live.t)}, and tries again every
        few seconds.
      </p>`
    }
    ${live.state === "silent" && html`<p class="verdict bad">${silence}</p>`}
    ${state === "late" && html`<p class="verdict past">${late}</p>`}
    ${isNumber(live.steps) && live.steps > 0 && html`<${Progress} share=${live.step / live.steps} />`}
    <${Tiles} tiles=${isOver ? data.tiles : liveTiles(data)} />
    <${Missing} missing=${data.missing} />
  </section>`;
}

const stateOf = (live, isLost) =>
  isLost && !ENDED.includes(live.state) ? "lost" : live.late_s ? "late" : live.state;

// Notifies of a death, a stall and the end, also while the page is hidden.
let isNotifying = false;

function Notify({ live, name }) {
  const [isOn, setOn] = useState(isNotifying),
    before = useRef(null);
  const { state, late_s: late, generations } = live,
    deaths = generations.filter((each) => each.what.includes("worker")).length;
  useEffect(() => {
    const old = before.current;
    before.current = { state, isLate: late > 0, deaths };
    if (!isOn || !old) return;
    const news = [
      state !== old.state && sentence(sayState(state)) + " after step " + figure(live.step) + ".",
      late > 0 && !old.isLate && "The last step was " + clock(late) + " ago.",
      deaths > old.deaths && sentence(generations[generations.length - 1].what) + ".",
    ].filter(Boolean);
    if (news.length) new Notification(name, { body: news.join(" "), tag: "paceline " + name });
  }, [state, late > 0, deaths]);
  if (!("Notification" in window) || ENDED.includes(state)) return null;
  const ask = async () => {
    isNotifying = !isOn && (await Notification.requestPermission()) === "granted";
    setOn(isNotifying);
  };
  return html`<button type="button" class="notify" aria-pressed=${String(isOn)} onClick=${ask}>
    Notify me
  </button>`;
}

// The line that stays visible while the page is scrolled: the run's progress.
function Summary({ name, live, isLost, loss }) {
  const state = stateOf(live, isLost),
    ofAll = isNumber(live.steps) ? " of " + figure(live.steps) : "";
  const facts = [
    "step " + figure(live.step) + ofAll,
    live.eta_s !== null && !isLost ? clock(live.eta_s) + " left" : "",
    isNumber(live.samples_per_s) ? figure(live.samples_per_s) + " samples/s" : "",
    loss ? "loss " + figure(loss[0]) : "",
  ];
  return html`<b>${name}</b><span class=${"badge " + state}>${sayState(state, live)}</span>
    ${facts.filter(Boolean).map((each) => html`<span>${each}</span>`)}`;
}

const timeOf = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en", { hour12: false });

const perSecond = (amount) => (isNumber(amount) ? bytes(amount) + "/s" : NOTHING);

// Every worker's last step.
function Now({ data: { workers, phases, inAll, state } }) {
  const longest = Math.max(1e-9, ...workers.map((each) => each.seconds)),
    used = Object.keys(phases).filter((phase) =>
      workers.some((each) => each.phases.some(([name]) => name === phase)),
    ),
    isOver = ENDED.includes(state),
    hasGpu = workers.some((each) => isNumber(each.gpu_share)),
    hasNetwork = workers.some((each) => each.network_bytes_per_s > 0);
  const head = ["", "phases of its last step", "step", isOver ? "waited for" : "waits for"];
  const rows = workers.map((each) => {
    const { worker, waits_for: last, waited_s: waited } = each,
      isGone = !each.is_alive && !isOver;
    const waits =
      isGone || last === null || last === undefined
        ? html`<span class="wide">${NOTHING}</span><span class="words">came last</span>`
        : html`<span class="words">${head[3]} </span>worker ${last}, <b>${duration(waited)}</b>`;
    return html`<li key=${worker} class=${isGone ? "gone" : ""} title=${"process " + each.pid}>
      <span class="bar-label">worker ${worker}${isGone && html`<em> gone</em>`}</span>
      <${Bar}
        pieces=${each.phases.map(([name, seconds]) => [
          name,
          seconds / longest,
          name + ": " + duration(seconds),
        ])}
      />
      <span class="bar-value">${duration(each.seconds)}</span>
      <span class="waits">${waits}</span>
      ${
        !isOver &&
        html`<span class="bar-value cpu"
            ><span class="words">CPU </span>${percent(each.cores)}</span
          ><span class="bar-value memory">${bytes(each.memory_bytes)}</span>
          ${
            hasNetwork &&
            html`<span class="bar-value network"
              ><span class="words">network </span>${perSecond(each.network_bytes_per_s)}</span
            >`
          }
          ${
            hasGpu &&
            html`<span class="bar-value gpu"
              ><span class="words">GPU </span>${percent(each.gpu_share)}, ${bytes(each.gpu_bytes)}</span
            >`
          }<span class="bar-value queue"
            ><span class="words">queue </span>${figure(each.queued)}</span
          >`
      }
    </li>`;
  });
  if (!isOver) head.push("CPU", "memory", ...(hasNetwork ? ["network"] : []), ...(hasGpu ? ["GPU"] : []), "queue");
  const looks = [isOver && "over", hasNetwork && "with-network", hasGpu && "with-gpu"];
  return html`<ul class=${["bars now-rows", ...looks.filter(Boolean)].join(" ")}>
      <li class="now-head" aria-hidden="true">${head.map((each) => html`<span>${each}</span>`)}</li>
      ${rows}
    </ul>
    <${Legend} entries=${used.map((phase) => [phase, phase, phases[phase]])} />
    ${!isOver && html`<${Note}>
      ${
        workers.some((each) => isNumber(each.queued))
          ? "Queue: the batches that a worker's loader has ready. At 0 the worker waits for data."
          : "No queue: every worker loads its batches itself; data is the time that takes."
      }
      ${" "}${
        hasNetwork
          ? "Network: what a worker sends and receives over TCP."
          : "No network: these workers exchange gradients through shared memory."
      }
    <//>`}
    ${inAll > workers.length && html`<${Note}>${workers.length} of ${figure(inAll)} are shown.<//>`}`;
}

// A small chart for each worker, all on one scale: own work, and waiting on top of it.
function Waits({ data: { blame, look, steps, workers, ms, waited_ms: waited } }) {
  const known = (column) => column.map((each) => (isNumber(each) ? each : 0)),
    totals = ms.map((column, i) => known(column).map((own, j) => own + known(waited[i])[j])),
    all = totals.flat().sort((a, b) => a - b),
    usual = all[Math.floor(0.9 * (all.length - 1))],
    // A few long pauses are cut off, so that other steps remain visible; the tip has their length.
    range = [0, 1.08 * Math.max(0.001, Math.min(all[all.length - 1], 1.7 * usual)), null];
  const say = (each) => (each ? duration(each / 1000) : "0");
  const line = (label, look, column, told) => ({
    label,
    look,
    bars: true,
    columns: [steps, column, column, column],
    told,
  });
  return html`<p class=${"verdict " + look}>${blame}</p>
    <${Legend}
      entries=${[
        ["own", "own work", "computing and fetching samples"],
        ["waited", "waiting", "for other workers and for the sums"],
      ]}
    />
    <div class="charts small">
      ${workers.map(
        (worker, i) =>
          html`<${Chart}
            key=${worker}
            title=${"worker " + worker}
            height=${118}
            legend=${false}
            group="last steps"
            ...${{ range, say }}
            curves=${[
              line("waited", "waited", totals[i], waited[i]),
              line("own work", "own", ms[i], ms[i]),
            ]}
          />`,
      )}
    </div>`;
}

// The last recorded batch, and the button that requests another recording: the page's only request.
function Recorded({ data: { traces, recording, state } }) {
  const [said, setSaid] = useState("");
  const last = traces && traces[traces.length - 1];
  useEffect(() => setSaid(""), [last && last.step]);
  const ask = async () => {
    try {
      const answer = await fetch(addressOf("/record"), { method: "POST" });
      setSaid(await answer.text());
    } catch {
      setSaid("The server of this page does not answer.");
    }
  };
  const isAsked = recording === "asked";
  return html`<div class="controls">
      <button type="button" class="record" disabled=${state !== "running" || isAsked} onClick=${ask}>
        Record the next step
      </button>
      <span class="note" role="status"
        >${isAsked ? "The next step will be recorded." : said}</span
      >
    </div>
    ${
      last
        ? html`<${Pipeline} key=${last.step} data=${[last]} />`
        : html`<${Note}>No step has been recorded yet.<//>`
    }`;
}

async function searchLog(wanted) {
  try {
    const answer = await fetch(addressOf("/log") + "&find=" + encodeURIComponent(wanted));
    return await answer.json();
  } catch {
    return null; // the event stream reports that the server is gone
  }
}

function Messages({ data: { messages, log, began } }) {
  return html`${
      messages.length > 0
        ? html`<${MessageList} ...${{ messages, began }} />`
        : html`<${Note}>No message so far.<//>`
    }
    <h3>Output</h3>
    ${
      log.length > 0
        ? html`<${Log} ...${{ lines: log, began, search: searchLog }} />`
        : html`<${Note}>
            Nothing so far. What several workers of <code>paceline run</code> print is kept in the
            run folder; one worker alone has the terminal for itself.
          <//>`
    }`;
}

// Several runs: their progress, settings, and curves in one chart.
const FACTS = ["state", "step", "steps/s", "samples/s", "efficiency"];

function Runs({ data: { run, runs } }) {
  const [chosen, setChosen] = useState(() => [
      run,
      ...runs.map((each) => each.name).filter((name) => name !== run),
    ].slice(0, 3)),
    [wanted, setWanted] = useState(""),
    [grouped, setGrouped] = useState(""),
    [[sorted, isDown], setSorted] = useState(["", false]),
    documents = useDocuments(chosen, runs);
  const choose = (name) =>
    setChosen((old) =>
      old.includes(name)
        ? old.filter((each) => each !== name)
        : [...old, name].slice(-COMPARED_LIMIT),
    );
  const compared = chosen
    .map((name, i) => ({ name, look: "worker" + i, shown: documents[name] }))
    .filter((each) => each.shown);
  const differing = [...new Set(runs.flatMap((each) => Object.keys(each.settings)))].filter(
    (key) => new Set(runs.map((each) => figure(each.settings[key], 6))).size > 1,
  );
  const factsOf = ({ name, state, step, settings }) => {
    const found = compared.find((each) => each.name === name),
      live = found && found.shown.live;
    return {
      ...settings,
      run: name,
      state: sayState(live ? live.state : state),
      step: live ? live.step : step,
      "steps/s": live && live.steps_per_s,
      "samples/s": live && live.samples_per_s,
      efficiency: found ? efficiencyOf(found.shown) : null,
    };
  };
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean),
    textOf = (facts) => Object.entries(facts).map(([key, value]) => key + "=" + figure(value, 6));
  const valueOf = (value) => (value === "" || isNaN(Number(value)) ? value : Number(value)),
    compare = (a, b) => (a === b ? 0 : a > b || b === null || b === undefined ? 1 : -1);
  const order = (key, sign) => (a, b) => sign * compare(valueOf(a[key]), valueOf(b[key]));
  const found = runs.map(factsOf).filter((facts) => {
    const text = textOf(facts).join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  if (sorted) found.sort(order(sorted, isDown ? -1 : 1));
  if (grouped) found.sort(order(grouped, 1));
  const columns = [...FACTS, ...differing];
  const cellsOf = (facts) => [
    html`<label class="choice"
      ><input
        type="checkbox"
        checked=${chosen.includes(facts.run)}
        onChange=${() => choose(facts.run)}
      />${facts.run === run ? html`<b>${facts.run}</b>` : facts.run}</label
    >`,
    facts.run === run ? "shown" : html`<a href=${addressOf("/", facts.run)}>show</a>`,
    ...FACTS.map((key) => (key === "efficiency" ? percent : figure)(facts[key])),
    ...differing.map((key) => figure(facts[key], 6)),
  ];
  const rows = found.flatMap((facts, i) => {
    const isNewGroup = grouped && (!i || facts[grouped] !== found[i - 1][grouped]),
      group = html`<b>${grouped} ${figure(facts[grouped], 6)}</b>`;
    return [...(isNewGroup ? [[group, ...columns.map(() => ""), ""]] : []), cellsOf(facts)];
  });
  const head = ["run", "", ...columns].map((key) =>
    key
      ? html`<button
          type="button"
          class="sort"
          onClick=${() => setSorted(([old, down]) => [key, old === key && !down])}
        >
          ${key}${sorted === key && (isDown ? " ▾" : " ▴")}
        </button>`
      : html`<span class="unseen">show it</span>`,
  );
  return html`<div class="controls">
      <label
        >Find${" "}<input
          type="search"
          placeholder="name, or lr=0.1"
          value=${wanted}
          onInput=${(event) => setWanted(event.target.value)}
        /></label
      >
      <label
        >Group by${" "}<select value=${grouped} onChange=${(event) => setGrouped(event.target.value)}>
          <option value="">nothing</option>
          ${["state", ...differing].map((key) => html`<option value=${key}>${key}</option>`)}
        </select></label
      >
      <span class="note" role="status">${figure(found.length)} of ${count(runs.length, "run")}</span>
    </div>
    <${Table} caption="Runs" head=${head} rows=${rows} words=${[0, 1, 2]} />
    <${Note}>Efficiency: the share of the workers' time that is neither waiting nor exchange.<//>
    ${compared.length > 1 && html`<${Compared} compared=${compared} />`}`;
}

const DASHES = { test: [4, 4], average: [1, 4] };

function Compared({ compared }) {
  const chartsOf = ({ shown }) => (shown.learning && shown.learning.charts) || [],
    names = [...new Set(compared.flatMap((each) => chartsOf(each).map((chart) => chart.name)))];
  const charts = names.map((name) => {
    const found = compared
        .map((each) => [each, chartsOf(each).find((chart) => chart.name === name)])
        .filter((each) => each[1]),
      lines = found.flatMap(([{ name: label, look }, { curves }]) =>
        curves.map((curve) => ({
          ...curve,
          look,
          label,
          ...(curve.look in DASHES && {
            label: label + " (" + curve.label + ")",
            dash: DASHES[curve.look],
            unlisted: curves.length > 1,
          }),
        })),
      );
    return [name, lines, found.every(([, chart]) => chart.is_share)];
  });
  const infos = compared.map(({ shown }) => {
    const info = (shown.details && shown.details.info) || {};
    return Object.fromEntries([...settingsOf(info).flat(), ["started by", info.command]]);
  });
  const settings = [...new Set(infos.flatMap(Object.keys))].filter(
    (key) => new Set(infos.map((info) => figure(info[key], 6))).size > 1,
  );
  return html`${
      charts.some(([, curves]) => curves.some((curve) => curve.unlisted)) &&
      html`<${Note}>Dashed: held-out data; dotted: with averaged weights.<//>`
    }
    <div class="charts">
      ${charts.map(
        ([name, curves, isShare]) =>
          html`<${Chart}
            key=${name}
            title=${sentence(titleOf(name))}
            curves=${curves}
            group="compared"
            say=${isShare ? percent : figure}
          />`,
      )}
    </div>
    ${
      settings.length
        ? html`<${Table}
            caption="Settings that differ"
            head=${["setting", ...compared.map((each) => each.name)]}
            rows=${settings.map((key) => [
              key,
              ...infos.map((info) => figure(info[key], 6)),
            ])}
            words=${[0, ...compared.keys()].map((_, i) => i)}
          />`
        : html`<${Note}>Their settings are the same.<//>`
    }`;
}

function efficiencyOf({ workers }) {
  const phases = ((workers && workers.ranks) || []).flatMap((rank) => Object.entries(rank.phases_s)),
    total = (wanted) => phases.filter(wanted).reduce((sum, [, seconds]) => sum + seconds, 0),
    all = total(() => true);
  return all ? total(([name]) => !["wait", "transfer"].includes(name)) / all : null;
}

// The documents of several runs, requested at intervals while the page is shown. That of an ended run is
// requested again when its entry in the list changes: the run may have been started again.
function useDocuments(names, runs) {
  const [documents, setDocuments] = useState({}),
    over = useRef({}),
    told = useRef({});
  told.current = Object.fromEntries(runs.map((each) => [each.name, each.state + each.step]));
  useEffect(() => {
    let isOver = false;
    const ask = async () => {
      for (const name of document.hidden ? [] : names) {
        const now = told.current[name];
        if (name in over.current && over.current[name] === now) continue;
        try {
          const answer = await fetch(addressOf("/document", name)),
            found = await answer.json();
          if (isOver) return;
          delete over.current[name];
          if (ENDED.includes(found.live.state)) over.current[name] = now;
          setDocuments((old) => ({ ...old, [name]: found }));
        } catch {
          continue; // the event stream reports that the server is gone
        }
      }
      if (!isOver) timer = setTimeout(ask, COMPARE_MS);
    };
    let timer = setTimeout(ask, 0);
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [names.join("\n")]);
  return documents;
}

// The sections of the page: live ones first, then those of the report.
const ofReport = (...names) => SECTIONS.filter(([name]) => names.includes(name));
const LIVE_SECTIONS = [
  ["now", Now, ({ state }) => (ENDED.includes(state) ? "The last step" : "Now"), "", ""],
  ["waits", Waits, "Waiting by worker", "The last 100 steps of every worker, all on one scale.", ""],
  ...ofReport("learning"),
  ["runs", Runs, "Comparison of runs", "", ""],
  ...ofReport("generations", "islands"),
  ["batch", Recorded, ...ofReport("pipeline")[0].slice(2)],
  ...ofReport("checkpoints", "workers", "timeline", "scaling"),
  ["messages", Messages, "Messages and output", "Messages, the newest first, and the output.", ""],
  ["details", Details, "Settings", "", ""],
];

// The sections for a document and the newest live part; null where there is nothing to show.
function sectionsOf(shown, live, isLost) {
  const { details, pipeline } = shown,
    told = details ? details.messages : [],
    newest = told.length ? told[told.length - 1].t : 0;
  const messages = [...told, ...live.messages.filter((each) => each.t > newest)].slice(-200);
  return {
    ...shown,
    pipeline: null,
    overview: {
      live,
      isLost,
      name: shown.name,
      sentences: shown.sentences,
      traceback: shown.traceback,
      tiles: shown.tiles,
      missing: shown.missing,
      loss: lastOf(shown.learning, "loss"),
    },
    now: live.workers.length
      ? { workers: live.workers, phases: live.phases, inAll: live.workers_in_all, state: live.state }
      : null,
    waits: live.last_steps.steps.length
      ? { ...live.last_steps, blame: live.blame, look: live.blame_look }
      : null,
    runs: shown.runs && shown.runs.length > 1 ? { run: live.run, runs: shown.runs } : null,
    batch: { traces: pipeline, recording: live.recording, state: live.state },
    messages: { messages: messages.reverse(), log: live.log, began: details && details.began },
    details: details && { ...details, messages: [], log: [] },
  };
}

// The sections, reusing the objects of those that have not changed, so that these are not drawn again.
function kept(old, fresh) {
  const same = (name) =>
    old[name] === fresh[name] || JSON.stringify(old[name]) === JSON.stringify(fresh[name]);
  return Object.fromEntries(
    Object.keys(fresh).map((name) => [name, same(name) ? old[name] : fresh[name]]),
  );
}

function Watch() {
  const [data, setData] = useState(null),
    [isLost, setLost] = useState(false),
    [drawn, setDrawn] = useState(FIRST_SECTIONS);
  // Draw the first screens at once, and the rest in the next frame.
  useEffect(() => {
    if (data) requestAnimationFrame(() => setTimeout(() => setDrawn(LIVE_SECTIONS.length)));
  }, [!data]);
  useEffect(() => {
    let shown = null,
      live = null,
      lost = false,
      stream = null,
      timer = 0,
      queued = 0;
    const draw = () => {
      queued = queued || requestAnimationFrame(() => {
        queued = 0;
        if (shown) setData((old) => kept(old || {}, sectionsOf(shown, live, lost)));
        setLost(lost);
      });
    };
    const close = () => {
      clearTimeout(timer);
      if (stream) stream.close();
      stream = null;
    };
    const open = () => {
      close();
      stream = new EventSource(addressOf("/events"));
      stream.addEventListener("document", (event) => {
        shown = kept(shown || {}, JSON.parse(event.data));
        live = shown.live;
        lost = false;
        draw();
      });
      stream.addEventListener("live", (event) => {
        live = JSON.parse(event.data);
        lost = false;
        // The first run has begun in an empty folder.
        if (!live.runs.some(({ name }) => name === live.run)) return open();
        draw();
      });
      stream.onerror = async () => {
        close();
        timer = setTimeout(open, RETRY_MS);
        const answer = await fetch(addressOf("/assets/page.css")).catch(() => null);
        lost = answer && answer.status === 403 ? "other" : "silent";
        draw();
      };
    };
    // A hidden page needs no news, and a browser has only six connections to a server for all tabs.
    const look = () => {
      if (!document.hidden) open();
      else if (!isNotifying) close();
    };
    document.addEventListener("visibilitychange", look);
    look();
    return () => {
      document.removeEventListener("visibilitychange", look);
      close();
    };
  }, []);
  useEffect(() => {
    if (!data) return;
    const { step, steps } = data.overview.live;
    document.title = (steps ? percent(step / steps) + " · " : "") + data.name + " · Paceline";
  }, [data]);
  if (!data)
    return html`<main id="main">
      <section><p>${isLost ? LOST[isLost] : "Reading the run …"}</p></section>
    </main>`;
  return html`<${Page}
    data=${data}
    sections=${LIVE_SECTIONS}
    drawn=${drawn}
    Head=${LiveHead}
    summary=${html`<${Summary} ...${data.overview} />`}
    footer=${html`Live from ${data.folder}, by paceline ${data.version}. The page reads what the run
    writes; the run does not know that it is watched.`}
  />`;
}

render(html`<${Watch} />`, document.getElementById("page"));
