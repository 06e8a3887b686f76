// Draws the report from the document in this file. A panel is a pure function of its part of the
// document, so the live page can show the same panels. Text is inserted as text only, never as markup.

// The sections of the page, and at its end those without data. A section has a name, a panel, a title,
// an explanation, and the text for a run without its data.
const SECTIONS = [
  [
    "learning",
    Learning,
    "Loss and metrics",
    "Every curve counts each sample once, whichever worker had it. " +
      "Samples per second are those of all workers, per elapsed second.",
    "nothing was recorded step by step, so there are no curves.",
  ],
  [
    "pipeline",
    Pipeline,
    "One batch through a step",
    "Data parallelism: every worker has a copy of the model, computes on its part of the batch, " +
      "and all copies get the same update.",
    html`no batch was recorded; <code>paceline run --trace-step 12</code> does that.`,
  ],
  [
    "workers",
    Workers,
    "Work and waiting by worker",
    "All workers finish a step together, so each step takes as long as the slowest one.",
    "none has finished a step.",
  ],
  [
    "generations",
    Generations,
    "Workers that died or joined",
    "A worker that dies is replaced, and the others continue with the step they were in.",
    "",
  ],
  [
    "islands",
    Islands,
    "Between islands",
    "Islands train separately, and average their parameters in rounds. This is one of them; each of " +
      "the others has its own page.",
    "",
  ],
  [
    "timeline",
    Timeline,
    "Timeline",
    "",
    html`no timeline was recorded; <code>paceline run --timeline</code> records one.`,
  ],
  [
    "scaling",
    Scaling,
    "Scaling",
    "",
    html`the job was not measured on several numbers of workers; <code>paceline scale</code> does that.`,
  ],
  ["checkpoints", Checkpoints, "Checkpoints", "", "none was written."],
  ["details", Details, "Settings and messages", "", ""],
];

// A panel is drawn again when its data change, and a panel that fails does not affect the others.
class Safe extends preact.Component {
  componentDidCatch(error) {
    this.setState({ error, failed: this.props.data });
  }

  shouldComponentUpdate({ data }, { error }) {
    return data !== this.props.data || error !== this.state.error;
  }

  render({ Panel, data }, { error, failed }) {
    return error && failed === data
      ? html`<p class="verdict bad">This cannot be drawn: ${error.message}</p>`
      : html`<${Panel} data=${data} />`;
  }
}

const titleFor = ([name, , title], data) =>
  title instanceof Function ? title(data[name]) : title;

// Folded sections stay folded in this browser. Without local storage nothing is remembered.
const remember = (use) => {
  try {
    return use(localStorage);
  } catch {
    return null;
  }
};

// A panel with its title, which folds it. A link to it opens it.
function Section({ name, Panel, title, lead, data }) {
  const key = "paceline folded " + name,
    [isFolded, setFolded] = useState(() => remember((kept) => kept.getItem(key)) === "yes");
  const fold = (folded) => {
    remember((kept) => kept.setItem(key, folded ? "yes" : "no"));
    setFolded(folded);
  };
  useEffect(() => {
    const open = () => location.hash === "#" + name && fold(false);
    addEventListener("hashchange", open);
    return () => removeEventListener("hashchange", open);
  }, []);
  return html`<section id=${name} aria-labelledby=${name + "-title"}>
    <h2 id=${name + "-title"}>
      <button
        type="button"
        class="fold"
        aria-expanded=${String(!isFolded)}
        onClick=${() => fold(!isFolded)}
      >
        ${title}
      </button>
    </h2>
    ${
      !isFolded &&
      html`${lead && html`<p class="lead">${lead}</p>`}<${Safe} Panel=${Panel} data=${data} />`
    }
  </section>`;
}

// Draws the first `drawn` of the sections. `summary` is always visible.
function Page({ data, sections = SECTIONS, drawn = sections.length, Head = Overview, ...rest }) {
  const shown = sections.filter(([name]) => data[name]),
    absent = sections.filter(([name, , , , why]) => !data[name] && why),
    links = [["overview", "Overview"], ...shown.map((each) => [each[0], titleFor(each, data)])];
  return html`<${Frame} label="Sections" links=${links} ...${rest}>
    <${Safe} Panel=${Head} data=${data.overview || data} />
    ${shown.slice(0, drawn).map(
      (each) =>
        html`<${Section}
          key=${each[0]}
          name=${each[0]}
          Panel=${each[1]}
          title=${titleFor(each, data)}
          lead=${each[3]}
          data=${data[each[0]]}
        />`,
    )}
    ${
      absent.length > 0 &&
      html`<section id="absent" aria-labelledby="absent-title">
        <h2 id="absent-title">Not recorded</h2>
        <ul>
          ${absent.map(([, , title, , why]) => html`<li><b>${title}</b>: ${why}</li>`)}
        </ul>
      </section>`
    }
  <//>`;
}

function Report({ data }) {
  const facts = data.tiles.map(([label, value]) => label + " " + value).slice(0, 4),
    summary = html`<b>${data.name}</b
      >${data.status && html`<span class=${"badge " + data.status}>${data.status}</span>`}${facts.map(
        (each) => html`<span>${each}</span>`,
      )}`,
    footer = html`Made by paceline ${data.version} on ${moment(data.made)} from ${data.folder}. This
    file is complete: it needs no network and sends nothing.`;
  return html`<${Page} ...${{ data, summary, footer }} />`;
}

// A page without a document, such as the live page, is drawn by the script that receives one.
const inside = document.getElementById("data");
if (inside)
  render(
    html`<${Report} data=${JSON.parse(inside.textContent)} />`,
    document.getElementById("page"),
  );
