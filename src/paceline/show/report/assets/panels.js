// Panels, in reading order.
function Overview({ data }) {
  const status = { stopped: "stopped early" }[data.status] || data.status;
  return html`<section id="overview" aria-label="Overview">
    <div class="headline">
      <h1>${data.name}</h1>
      ${status && html`<span class=${"badge " + data.status}>${status}</span>`}
    </div>
    <${Story} data=${data} state=${data.status} />
    <${Tiles} tiles=${data.tiles} />
    <${Missing} missing=${data.missing} />
  </section>`;
}

// The sentences about the run; if it ended too early, the first one says why.
const BAD_ENDS = ["failed", "killed", "silent"];

function Story({ data: { sentences, traceback = [] }, state }) {
  const [first, ...others] = sentences,
    isBad = BAD_ENDS.includes(state);
  return html`<div class="story">
      ${
        isBad || state === "stopped"
          ? html`<p class=${"verdict " + (isBad ? "bad" : "past")}><strong>${first}</strong></p>`
          : html`<p>${first}</p>`
      }
      ${others.map((each) => html`<p>${each}</p>`)}
    </div>
    ${
      traceback.length > 0 &&
      html`<details class="traceback">
        <summary>Traceback</summary>
        <pre tabindex="0" aria-label="Traceback">${traceback.join("\n")}</pre>
      </details>`
    }`;
}

function Tiles({ tiles }) {
  return html`<dl class="tiles">
    ${tiles.map(
      ([label, value, note]) =>
        html`<div key=${label}>
          <dt>${label}</dt>
          <dd>${value}<small>${note}</small></dd>
        </div>`,
    )}
  </dl>`;
}

function Missing({ missing }) {
  return (
    missing.length > 0 &&
    html`<div class="missing">
      <strong>Missing on this page</strong>
      <ul>
        ${missing.map((each) => html`<li>${each}</li>`)}
      </ul>
    </div>`
  );
}

// Titles of metrics whose names are not meant for people.
const TITLES = {
    grad_norm: "gradient norm",
    island_drift: "how far islands are from their average",
    island_bytes: "bytes sent in a round",
    island_round_s: "seconds that it waited for a round",
  },
  parentOf = (name) => name.replace(/^ema_/, ""),
  titleOf = (name) =>
    TITLES[name] || (name.startsWith("ema_") ? parentOf(name) + ", averaged weights" : name);

function Learning({ data: { charts, epochs, evaluations } }) {
  const [yLog, setLog] = useState(false),
    [smoothing, setSmoothing] = useState(SMOOTHING),
    shares = charts.filter((chart) => chart.is_share).map((chart) => chart.name),
    ends = epochs.filter(({ epoch, step }) => isNumber(epoch) && isNumber(step)),
    ticks = ends.map(({ epoch, step }) => [step, figure(epoch + 1)]);
  const scale = (name, isLog) =>
    html`<button
      type="button"
      aria-pressed=${String(yLog === isLog)}
      onClick=${() => setLog(isLog)}
    >
      ${name}
    </button>`;
  return html`<div class="controls">
      <span class="switch" role="group" aria-label="Scale of the curves">
        ${scale("Linear", false)}${scale("Log", true)}
      </span>
      <${Smoothing} smoothing=${smoothing} onChange=${setSmoothing} />
      <span class="hint">drag to zoom all, or use arrow keys, + and -; 0 shows all</span>
    </div>
    <div class="charts">
      ${charts.map(
        (chart) =>
          html`<${Metric} key=${chart.name} ...${chart} ...${{ ticks, yLog, smoothing }} />`,
      )}
    </div>
    <${Epochs} ...${{ epochs, evaluations, shares }} />`;
}

// How much noisy curves are smoothed; measured values are drawn pale behind them.
function Smoothing({ smoothing, onChange }) {
  return html`<label class="slider"
    >Smoothing<input
      type="range"
      min="0"
      max=${MOST_SMOOTHING}
      step="5"
      value=${smoothing}
      onInput=${(event) => onChange(Number(event.target.value))}
    /><output>${smoothing ? smoothing / 10 + SPACE + "%" : "off"}</output></label
  >`;
}

function Metric({ name, curves, is_share = false, first_bad = null, ticks, yLog, smoothing }) {
  const say = is_share ? percent : figure,
    [, means, lows, highs] = curves[0].columns;
  const [lowest, highest] = [Math.min(...means), Math.max(...means)];
  let said =
    lowest === highest
      ? "Always " + say(lowest) + "."
      : `From ${say(means[0])} to ${say(means[means.length - 1])}; ` +
        (is_share ? "highest " + say(highest) : "lowest " + say(lowest)) +
        ".";
  const hasBand = highs.some((high, i) => high > lows[i]);
  if (hasBand && !isSmoothed(curves[0], smoothing))
    said += " The pale band holds the lowest and highest steps.";
  if (first_bad !== null)
    said += " Values that are not numbers, first at step " + figure(first_bad) + ".";
  const canLog = yLog && !is_share && means.some((each) => each > 0),
    zero = is_share || curves[0].look === "rate" || (name === "loss" && Math.min(...lows) >= 0);
  return html`<${Chart}
    title=${sentence(titleOf(name))}
    yLog=${canLog}
    group="steps"
    ...${{ curves, say, said, zero, ticks, smoothing }}
  />`;
}

const ROWS_LIMIT = 60;

// At most this many rows, evenly spread, including the first and the last.
function spread(rows) {
  const apart = Math.max(1, (rows.length - 1) / (ROWS_LIMIT - 1));
  return rows.filter((_, i) => Math.floor(i / apart) > Math.floor((i - 1) / apart));
}

function Epochs({ epochs, evaluations, shares }) {
  const byEpoch = (events) => new Map(events.map((event) => [event.epoch, event]));
  const kinds = [
    ["", byEpoch(epochs)],
    [" (held-out)", byEpoch(evaluations)],
  ];
  const numbers = [...new Set(kinds.flatMap(([, events]) => [...events.keys()]))]
      .filter(isNumber)
      .sort((a, b) => a - b),
    shown = spread(numbers),
    left = numbers.length - shown.length;
  if (!numbers.length) return null;
  const metricsOf = (events, number) => (events.get(number) || {}).metrics || {};
  const columns = kinds.flatMap(([where, events]) =>
    [...new Set(numbers.flatMap((number) => Object.keys(metricsOf(events, number))))].map(
      (name) => [name, where, events],
    ),
  );
  const rows = shown.map((number) => {
    const { samples, seconds } = kinds[0][1].get(number) || {};
    const cells = columns.map(([name, , events]) =>
      (shares.includes(parentOf(name)) ? percent : figure)(metricsOf(events, number)[name]),
    );
    return [
      number + 1,
      ...cells,
      figure(samples),
      duration(seconds),
      figure(samples / seconds || null),
    ];
  });
  const titles = columns.map(([name, where]) => titleOf(name) + where);
  return html`<${Table}
      caption="Epoch by epoch, means over all samples"
      head=${["epoch", ...titles, "samples", "time", "samples/s"]}
      rows=${rows}
    />
    ${left > 0 && html`<${Note}>${count(left, "epoch")} between these rows are left out.<//>`}`;
}

// Waiting is caused by another worker, so it is hatched.
function Workers({ data: { verdict, look, slow_ranks: slow, phases, ranks, ranks_in_all: inAll } }) {
  const wholeOf = (rank) => Object.values(rank.phases_s).reduce((a, b) => a + b, 0),
    measured = ranks.filter(wholeOf);
  const longest = Math.max(...measured.map(wholeOf)),
    used = Object.keys(phases).filter((phase) => ranks.some((rank) => phase in rank.phases_s));
  const shown =
    figure(inAll) +
    ` workers took part; shown are the ${ranks.length} whose own work takes longest and shortest.`;
  const bars = measured.map((rank) => [
    html`worker ${rank.rank}${slow.includes(rank.rank) && html`<em> slow</em>`}`,
    used
      .filter((phase) => rank.phases_s[phase])
      .map((phase) => [
        phase,
        rank.phases_s[phase] / longest,
        phase + ": " + duration(rank.phases_s[phase]),
      ]),
    duration(wholeOf(rank)),
  ]);
  const where = [...new Set(ranks.map((rank) => rank.where))].filter(Boolean).slice(0, 8);
  const rows = ranks.map((rank) => [
    rank.rank,
    figure(rank.samples),
    html`<b>${duration(rank.own_s)}</b>`,
    ...used.map((phase) => duration(rank.phases_s[phase])),
    rank.phases_s.wait ? percent(rank.phases_s.wait / wholeOf(rank)) : NOTHING,
  ]);
  return html`<p class=${"verdict " + look}>${verdict}</p>
    ${inAll > ranks.length && html`<${Note}>${shown}<//>`}
    ${
      bars.length > 0 &&
      html`<figure>
        <figcaption><strong>An average step of each worker</strong></figcaption>
        <${Bars} rows=${bars} />
        <${Legend} entries=${used.map((phase) => [phase, phase, phases[phase]])} />
      </figure>`
    }
    <${Table}
      caption="Times are averages of one step"
      head=${["worker", "samples", "own work", ...used, "time waiting"]}
      rows=${rows}
    />
    ${where.length > 0 && html`<${Note}>They ran on: ${where.join(", ")}.<//>`}`;
}

function Generations({ data: { verdict, columns, events } }) {
  const shown = events.slice(-ROWS_LIMIT),
    left = events.length - shown.length;
  const rows = shown.map(({ after_s, step, what, workers }) => [
    duration(after_s),
    figure(step),
    what,
    figure(workers),
  ]);
  return html`<p class="verdict">${verdict}</p>
    <${Chart}
      title="Workers that train"
      xLabel="seconds"
      say=${figure}
      zero=${true}
      said=""
      curves=${[{ label: "workers", look: "measured", columns, dots: false }]}
    />
    <${Table}
      caption="Events"
      head=${["after", "in step", "what", "workers then"]}
      rows=${rows}
      words=${[2]}
    />
    ${left > 0 && html`<${Note}>${count(left, "event")} before these are left out.<//>`}`;
}

function Islands({ data: { verdict, charts } }) {
  return html`<p class="verdict">${verdict}</p>
    <div class="charts">
      ${charts.map(
        (chart) =>
          html`<${Metric} key=${chart.name} ...${chart} ticks=${[]} yLog=${false} smoothing=${0} />`,
      )}
    </div>`;
}

const MODES = {
  strong: "Strong scaling: the batch stays the same, and more workers share it.",
  weak: "Weak scaling: every worker keeps its part, so more workers mean a larger batch.",
};

function Scaling({ data: { mode, measured, predicted, meanings, suggestion, check } }) {
  const last = measured[measured.length - 1],
    networks = [...new Set(predicted.map((size) => size.network))];
  const groups = networks.map((network) => [
    "predicted" + (network ? ", " + network : ""),
    predicted.filter((size) => size.network === network),
  ]);
  const every = [...measured, ...predicted],
    marks = [...new Set([1, 2, ...every.map((size) => size.workers)])].sort((a, b) => a - b);
  const line = (label, look, sizes, dots, dash) => {
    const speeds = sizes.map((size) => size.speedup);
    return {
      label,
      look,
      dots,
      dash,
      columns: [sizes.map((size) => size.workers), speeds, speeds, speeds],
    };
  };
  const curves = [
    line("measured", "measured", measured, true),
    ...groups.map(([how, sizes], i) =>
      line(
        how,
        "predicted" + (i % 3),
        sizes[0].workers > last.workers ? [last, ...sizes] : sizes,
        true,
        [6, 5],
      ),
    ),
    line(
      "ideal: n workers, n times as fast",
      "ideal",
      marks.map((workers) => ({ workers, speedup: workers })),
      false,
      [1, 4],
    ),
  ];
  const rows = [["measured", measured], ...groups].flatMap(([how, sizes]) =>
    sizes.map((size) => [
      figure(size.workers),
      how,
      figure(size.speedup),
      percent(size.of_ideal),
      duration(size.step_s),
    ]),
  );
  const verdict =
    last.workers > 1
      ? count(last.workers, "worker") +
        " are " +
        figure(last.speedup) +
        " times as fast as one: " +
        percent(last.of_ideal) +
        " of the ideal."
      : "Only one worker was measured, so there is nothing to compare it with.";
  const isLong = marks[marks.length - 1] > 16,
    said = predicted.length ? "Dashed lines are predicted, not measured." : "";
  return html`<p class="verdict"><strong>${verdict}</strong></p>
    <p>${MODES[mode]}</p>
    <${Chart}
      title="How many times as fast as one worker"
      xLabel="workers"
      say=${(value) => figure(value) + " ×"}
      log=${isLong}
      zero=${!isLong}
      height=${300}
      ...${{ curves, marks, said }}
    />
    <${Table}
      caption="Speed-up by number of workers"
      head=${["workers", "how", "times as fast", "of the ideal", "time of a step"]}
      rows=${rows}
      words=${[0, 1]}
    />
    <${Losses} ...${{ measured, meanings }} />
    ${
      suggestion &&
      html`<h3>Suggestion</h3>
        <p>${sentence(suggestion)}</p>`
    }
    ${
      check &&
      html`<h3>Accuracy of the prediction</h3>
        <p>${sentence(check)}</p>`
    }`;
}

function Losses({ measured, meanings }) {
  const sizes = measured.filter((size) => Object.keys(size.lost).length);
  if (!sizes.length) return null;
  const names = Object.keys(meanings).filter((name) => sizes.some((size) => name in size.lost));
  const say = (share) => (share === undefined ? NOTHING : share + SPACE + "%");
  const bars = sizes.map(({ workers, of_ideal, lost }) => [
    count(workers, "worker"),
    names
      .filter((name) => lost[name])
      .map((name) => [name, lost[name] / 100, name + ": " + say(lost[name])]),
    percent(1 - of_ideal) + " lost",
  ]);
  return html`<h3>Where the rest is lost</h3>
    <p>The causes of lost time against ideal scaling, as shares of the time lost.</p>
    <${Bars} rows=${bars} /><${Legend}
      entries=${names.map((name) => [name, name, meanings[name]])}
    />
    <${Table}
      caption="Shares of the lost time"
      head=${["workers", ...names]}
      rows=${sizes.map(({ workers, lost }) => [figure(workers), ...names.map((n) => say(lost[n]))])}
    />`;
}

function Checkpoints({ data: { saved, command } }) {
  const kept = saved.filter((row) => row.is_there),
    newest = kept[kept.length - 1],
    others = saved.filter((row) => !row.is_there),
    older = others.slice(-ROWS_LIMIT),
    left = others.length - older.length;
  const marksOf = (row) =>
    [row.is_best && "best", row === newest && "newest"].filter((mark) => mark);
  const cellsOf = (row) => [
    html`<span class="keep">${figure(row.name)}</span
      >${marksOf(row).map((mark) => html` <span class=${"mark " + mark}>${mark}</span>`)}`,
    row.is_there ? "there" : "deleted",
    figure(row.step),
    bytes(row.bytes),
    duration(row.seconds),
    figure(row.metric),
  ];
  const table = (caption, rows) =>
    html`<${Table}
      caption=${caption}
      head=${["name", "now", "after step", "size", "time to save", "metric"]}
      rows=${rows.map(cellsOf)}
      words=${[0, 1]}
    />`;
  const last = figure(saved[saved.length - 1].step);
  const said =
    count(saved.length, "checkpoint") +
    ` written, the last one after step ${last}; ${kept.length} of them still in the folder.`;
  return html`<p>${said} A checkpoint holds everything that a run needs to continue.</p>
    ${
      newest &&
      html`<p>
        ${command
          ? html`To resume, in the folder where it was started: <code class="command">${command}</code>.`
          : "To resume: start the same command again."}
        ${" "}It continues after step ${figure(newest.step)}.
      </p>`
    }
    ${kept.length > 0 && table("Checkpoints in the folder", kept.slice(-ROWS_LIMIT))}
    ${
      older.length > 0 &&
      html`<details>
        <summary>${count(others.length, "checkpoint")} deleted since</summary>
        ${table("Checkpoints that are deleted", older)}
        ${left > 0 && html`<${Note}>${count(left, "older one")} not shown.<//>`}
      </details>`
    }`;
}

// All settings of a run by name: the user's, and those that follow from them.
function settingsOf({ settings = {}, seed, epochs, global_batch, shards, workers, ...rest }) {
  const { dataset_size, steps_per_epoch, steps, model, parameters, device, host, versions } = rest;
  const chosen = { ...settings, seed, epochs, global_batch, shards, workers };
  const found = { dataset_size, steps_per_epoch, steps, model, parameters, device, host };
  return [chosen, { ...found, ...versions }].map((group) =>
    Object.entries(group)
      .filter(([, value]) => value !== undefined)
      .map(([key, value]) => [key.replaceAll("_", " "), value]),
  );
}

function Pairs({ items }) {
  return html`<dl class="settings">
    ${items.map(
      ([key, value]) =>
        html`<div>
          <dt>${key}</dt>
          <dd>${figure(value, 6)}</dd>
        </div>`,
    )}
  </dl>`;
}

function Settings({ info }) {
  const { policy, created, updated, command } = info,
    [chosen, found] = settingsOf(info),
    times = [
      ["created", moment(created)],
      ["updated", moment(updated)],
    ];
  return html`<${Pairs} items=${chosen} />
    <h3>Machine and versions</h3>
    <${Pairs} items=${[...found, ...times]} />
    ${
      command &&
      html`<h3>Command</h3>
        <p><code>${command}</code></p>`
    }
    ${
      policy.length > 0 &&
      html`<h3>Decisions and reasons</h3>
        <ul>
          ${policy.slice(0, 20).map((line) => html`<li>${line}</li>`)}
        </ul>`
    }`;
}

function Details({ data: { info, noise, began, messages, messages_limit: limit, log } }) {
  return html`${info && html`<${Settings} info=${info} />`}
  ${
    noise &&
    html`<h3>Is the batch the right size?</h3>
      <p>
        At step ${figure(noise.step)} the gradient noise scale was ${figure(noise.noise_scale)}:
        larger batches than about that many samples bring little more. ${figure(noise.advice || "")}
      </p>`
  }
  ${
    messages.length > 0 &&
    html`<h3>Messages</h3>
      ${messages.length === limit && html`<p>These are the last ${limit} messages.</p>`}
      <${MessageList} ...${{ messages, began }} />`
  }
  ${
    log.length > 0 &&
    html`<h3>Output</h3>
      <${Log} ...${{ lines: log, began }} />`
  }`;
}

// The output in order of time, with a search box. `search`, if given, searches all of it on the server.
function Log({ lines, began, search }) {
  const [wanted, setWanted] = useState(""),
    [found, setFound] = useState(null),
    box = useRef(null);
  useEffect(() => {
    if (!wanted) return setFound(null);
    const local = lines.filter(({ text }) => text.toLowerCase().includes(wanted.toLowerCase()));
    if (!search) return setFound(local);
    const timer = setTimeout(async () => setFound((await search(wanted)) || local), 250);
    return () => clearTimeout(timer);
  }, [wanted]);
  useEffect(() => {
    const list = box.current && box.current.querySelector("ul");
    if (list) list.scrollTop = list.scrollHeight;
  }, [lines[lines.length - 1], found]);
  return html`<div class="controls">
      <label
        >Find${" "}<input
          type="search"
          value=${wanted}
          onInput=${(event) => setWanted(event.target.value)}
      /></label>
      <span class="note" role="status">${wanted && found && count(found.length, "line")}</span>
    </div>
    <div ref=${box}>
      <${MessageList} ...${{ messages: found || lines, began, label: "Output" }} />
    </div>`;
}

function MessageList({ messages, began, label = "Messages" }) {
  return html`<ul class="messages" tabindex="0" aria-label=${label}>
    ${messages.map(
      ({ t, rank, level, text }) =>
        html`<li class=${["warning", "error"].includes(level) ? level : ""}>
          <span class="when">${t && isNumber(began) ? (t - began).toFixed(1) + " s" : NOTHING}</span
          ><span class="who">${isNumber(rank) ? "worker " + rank : "all"}</span><span class="text">${figure(text)}</span>
        </li>`,
    )}
  </ul>`;
}
