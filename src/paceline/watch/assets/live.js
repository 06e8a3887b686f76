// The live page: the report's page, drawn again whenever the server says something new, with the
// panels that only a running training has in front. A panel is drawn again only if its part of the
// document has changed.

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
const sayState = (state) =>
  ({ stopped: "stopped early", lost: "not connected" })[state] || state;

// Why a page gets nothing more, and what to do.
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

// How many workers are there: known now, known then, or not at all.
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
    ["time left", live.eta_s === null || isLost ? NOTHING : clock(live.eta_s), clock(live.elapsed_s) + " so far"],
    ["samples/s", figure(live.samples_per_s), perStep],
    aliveTile(live, isLost),
    ["training loss", figure(loss && loss[0]), loss ? "near step " + figure(Math.round(loss[1])) : ""],
  ];
}

const perEpoch = ({ steps_per_epoch: steps }) => (isNumber(steps) ? count(steps, "step") + " each" : "");

// Whole seconds, so that what changes four times a second stays as wide as it is.
const clock = (seconds) => (isNumber(seconds) ? duration(Math.max(1, Math.round(seconds))) : NOTHING);

function LiveHead({ data }) {
  const { live, isLost } = data, // isLost: false, or why
    isOver = ENDED.includes(live.state),
    state = isLost && !isOver ? "lost" : live.state;
  const silence =
    "Nothing was written for " + clock(live.silent_s) + ": it hangs, was killed, or its disk is full.";
  return html`<section id="overview" aria-label="Overview">
    <div class="headline">
      <h1>${data.name}</h1>
      <span class=${"badge " + state} role="status">${sayState(state)}</span>
      <a class="button save" href=${addressOf("/report")} download>Save as report.html</a>
    </div>
    <div class="story">
      ${(isOver ? data.sentences : data.sentences.slice(0, 1)).map((each) => html`<p>${each}</p>`)}
    </div>
    ${
      isLost &&
      html`<p class="verdict bad">
        ${LOST[isLost]} Shown is what it said last, at ${timeOf(live.t)}; the page tries again every
        few seconds.
      </p>`
    }
    ${live.state === "silent" && html`<p class="verdict bad">${silence}</p>`}
    ${isNumber(live.steps) && live.steps > 0 && html`<${Progress} share=${live.step / live.steps} />`}
    <${Tiles} tiles=${isOver ? data.tiles : liveTiles(data)} />
    <${Missing} missing=${data.missing} />
  </section>`;
}

const timeOf = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en", { hour12: false });

// What every worker did in its last step.
function Now({ data: { workers, phases, inAll, state } }) {
  const longest = Math.max(1e-9, ...workers.map((each) => each.seconds)),
    used = Object.keys(phases).filter((phase) =>
      workers.some((each) => each.phases.some(([name]) => name === phase)),
    ),
    isOver = ENDED.includes(state);
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
        html`<span class="bar-value memory">${bytes(each.memory_bytes)}</span>
          <span class="bar-value queue"
            ><span class="words">queue </span>${figure(each.queued)}</span
          >`
      }
    </li>`;
  });
  if (!isOver) head.push("memory", "queue");
  return html`<ul class=${"bars now-rows" + (isOver ? " over" : "")}>
      <li class="now-head" aria-hidden="true">${head.map((each) => html`<span>${each}</span>`)}</li>
      ${rows}
    </ul>
    <${Legend} entries=${used.map((phase) => [phase, phase, phases[phase]])} />
    ${!isOver && html`<${Note}>
      ${
        workers.some((each) => isNumber(each.queued))
          ? "Queue: the batches that a worker's loader has ready. At 0 the worker waits for data."
          : "No queue: every worker loads its batches itself, and data is how long that takes."
      }
    <//>`}
    ${inAll > workers.length && html`<${Note}>Shown are ${workers.length} of ${figure(inAll)}.<//>`}`;
}

// A small chart for each worker, all on one scale: own work, and what it waited on top of it.
function Waits({ data: { blame, isSlow, steps, workers, ms, waited_ms: waited } }) {
  const known = (column) => column.map((each) => (isNumber(each) ? each : 0)),
    totals = ms.map((column, i) => known(column).map((own, j) => own + known(waited[i])[j])),
    all = totals.flat().sort((a, b) => a - b),
    usual = all[Math.floor(0.9 * (all.length - 1))],
    // A few long pauses are cut off, so that the other steps can be seen; the tip says how long.
    range = [0, 1.08 * Math.max(0.001, Math.min(all[all.length - 1], 1.7 * usual)), null];
  const say = (each) => (each ? duration(each / 1000) : "0");
  const line = (label, look, column, told) => ({
    label,
    look,
    bars: true,
    columns: [steps, column, column, column],
    told,
  });
  return html`<p class=${"verdict " + (isSlow ? "bad" : "good")}>${blame}</p>
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
            ...${{ range, say }}
            curves=${[
              line("waited", "waited", totals[i], waited[i]),
              line("own work", "own", ms[i], ms[i]),
            ]}
          />`,
      )}
    </div>`;
}

// The last recorded batch, and the one thing that the page may ask for.
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
        >${isAsked ? "Asked for: the next step will be recorded." : said}</span
      >
    </div>
    ${
      last
        ? html`<${Pipeline} key=${last.step} data=${[last]} />`
        : html`<${Note}>No step is recorded yet.<//>`
    }`;
}

function Messages({ data: { messages, log, began } }) {
  const box = useRef(null);
  useEffect(() => {
    if (box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [log[log.length - 1]]);
  return html`${messages.length > 0 && html`<${MessageList} ...${{ messages, began }} />`}
  ${messages.length === 0 && html`<${Note}>No message so far.<//>`}
  <h3>Log</h3>
  ${
    log.length > 0
      ? html`<ul class="messages log" ref=${box} tabindex="0" aria-label="Log">
          ${log.map((line) => html`<li><span class="text">${line}</span></li>`)}
        </ul>`
      : html`<${Note}>
          What workers print is kept where the run is told so:${" "}
          <code>paceline run --log-dir RUN/logs -r 3</code> writes it into the run folder, and its
          last lines are shown here.
        <//>`
  }`;
}

// Several runs: where each is, their curves on top of each other, and what differs.
function Runs({ data: { run, runs } }) {
  const [chosen, setChosen] = useState(() => [
      run,
      ...runs.map((each) => each.name).filter((name) => name !== run),
    ].slice(0, 3)),
    documents = useDocuments(chosen);
  const choose = (name) =>
    setChosen((old) =>
      old.includes(name)
        ? old.filter((each) => each !== name)
        : [...old, name].slice(-COMPARED_LIMIT),
    );
  const compared = chosen
    .map((name, i) => ({ name, look: "worker" + i, shown: documents[name] }))
    .filter((each) => each.shown);
  const rows = runs.map(({ name, state, step }) => {
    const found = compared.find((each) => each.name === name),
      live = found && found.shown.live;
    return [
      html`<label class="choice"
        ><input
          type="checkbox"
          checked=${chosen.includes(name)}
          onChange=${() => choose(name)}
        />${name === run ? html`<b>${name}</b>` : name}</label
      >`,
      name === run ? "shown" : html`<a href=${addressOf("/", name)}>show</a>`,
      sayState(live ? live.state : state),
      figure(live ? live.step : step),
      figure(live && live.steps_per_s),
      figure(live && live.samples_per_s),
      found ? percent(efficiencyOf(found.shown)) : NOTHING,
    ];
  });
  return html`<${Table}
      caption="Runs"
      head=${["run", "", "state", "step", "steps/s", "samples/s", "efficiency"]}
      rows=${rows}
      words=${[0, 1, 2]}
    />
    <${Note}>Efficiency: the share of the workers' time that is neither waiting nor exchange.<//>
    ${compared.length > 1 && html`<${Compared} compared=${compared} />`}`;
}

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
          ...(curve.look === "test" && {
            label: label + " (held-out)",
            dash: [4, 4],
            unlisted: curves.length > 1,
          }),
        })),
      );
    return [name, lines, found.every(([, chart]) => chart.is_share)];
  });
  const infos = compared.map(({ shown }) => (shown.details && shown.details.info) || {}),
    left = ["name", "created", "updated", "status", "step", "policy", "versions", "schema"];
  const settings = [...new Set(infos.flatMap(Object.keys))].filter(
    (key) => !left.includes(key) && new Set(infos.map((info) => figure(info[key], 6))).size > 1,
  );
  return html`${
      charts.some(([, curves]) => curves.some((curve) => curve.unlisted)) &&
      html`<${Note}>Dashed: held-out data.<//>`
    }
    <div class="charts">
      ${charts.map(
        ([name, curves, isShare]) =>
          html`<${Chart}
            key=${name}
            title=${sentence(TITLES[name] || name)}
            curves=${curves}
            say=${isShare ? percent : figure}
          />`,
      )}
    </div>
    ${
      settings.length
        ? html`<${Table}
            caption="Settings that differ"
            head=${["", ...compared.map((each) => each.name)]}
            rows=${settings.map((key) => [
              { command: "started by" }[key] || key.replaceAll("_", " "),
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

// The documents of several runs, asked for again and again while somebody looks.
function useDocuments(names) {
  const [documents, setDocuments] = useState({}),
    over = useRef(new Set());
  useEffect(() => {
    let isOver = false;
    const ask = async () => {
      for (const name of document.hidden ? [] : names) {
        if (over.current.has(name)) continue;
        try {
          const answer = await fetch(addressOf("/document", name)),
            found = await answer.json();
          if (isOver) return;
          if (ENDED.includes(found.live.state)) over.current.add(name);
          setDocuments((old) => ({ ...old, [name]: found }));
        } catch {
          continue; // the stream says that the server is gone
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

// The page, section by section: what is live first, then what the report has.
const BATCH = SECTIONS.find(([name]) => name === "pipeline");
const LIVE_SECTIONS = [
  ["runs", Runs, "These runs side by side", "", ""],
  ["now", Now, ({ state }) => (ENDED.includes(state) ? "The last step" : "Now"), "", ""],
  ["waits", Waits, "Who waits", "The last 100 steps of every worker, all on one scale.", ""],
  ...SECTIONS.filter(([name]) => name === "learning" || name === "generations"),
  ["batch", Recorded, ...BATCH.slice(2)],
  ...SECTIONS.filter(([name]) => ["checkpoints", "workers", "timeline", "scaling"].includes(name)),
  ["messages", Messages, "What it said", "Messages, the newest first, and what workers printed.", ""],
  ["details", Details, "Settings", "", ""],
];

// The sections that a document and the newest live part have; null where there is nothing to show.
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
      tiles: shown.tiles,
      missing: shown.missing,
      loss: lastOf(shown.learning, "loss"),
    },
    now: live.workers.length
      ? { workers: live.workers, phases: live.phases, inAll: live.workers_in_all, state: live.state }
      : null,
    waits: live.last_steps.steps.length
      ? { ...live.last_steps, blame: live.blame, isSlow: live.blame.startsWith("Worker ") }
      : null,
    runs: live.runs.length > 1 ? { run: live.run, runs: live.runs } : null,
    batch: { traces: pipeline, recording: live.recording, state: live.state },
    messages: { messages: messages.reverse(), log: live.log, began: details && details.began },
    details: details && { ...details, messages: [] },
  };
}

// The same sections, with those that have not changed being the very same objects.
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
  // What is on the first screens comes first, and the rest with the next frame.
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
    // A page that nobody sees needs no news, and a browser has six connections for all its tabs.
    const look = () => (document.hidden ? close() : open());
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
  return html`<${Page} data=${data} sections=${LIVE_SECTIONS} drawn=${drawn} Head=${LiveHead}>
    Live from ${data.folder}, by paceline ${data.version}. The page reads what the run writes; the
    run does not know that it is watched.
  <//>`;
}

render(html`<${Watch} />`, document.getElementById("page"));
